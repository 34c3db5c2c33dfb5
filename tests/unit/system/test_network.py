"""Through which interface the machines of a run talk."""

from __future__ import annotations

import os
import socket

import pytest
from torch.distributed import HashStore

from ddp_train.distributed import world as distributed
from ddp_train.system.network import address_towards, interface_of, interfaces


def test_the_kernel_knows_which_interface_has_an_address() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.7") is None
    assert interface_of("node7") is None
    for name in ("127.0.0.1", "localhost", "127.0.1.1", "no.such.host.invalid"):
        assert address_towards(name) == ""
    route = address_towards("203.0.113.7")  # of which nobody but a default route knows
    assert route == "" or interface_of(route) in [name for _, name in socket.if_nameindex()]


def test_every_interface_is_listed_with_its_addresses() -> None:
    found = interfaces()
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in next(addresses for name, addresses in found.items() if name in ("lo", "lo0"))


ROUTES = {  # of three machines: towards whom -> with which address
    0: {"node0": "", "10.0.0.1": "10.0.0.0", "10.0.0.2": "10.0.0.0"},  # its own name is 127.0.1.1 to it
    1: {"node0": "10.0.0.1"},
    2: {"node0": "10.0.0.2"},
}
INTERFACES = {"10.0.0.0": "ib0", "10.0.0.1": "eth1", "10.0.0.2": "bond0"}


def interface_on(node: int, store: HashStore, monkeypatch: pytest.MonkeyPatch, *, nodes: int = 3, own: str = "") -> str | None:
    """Return what GLOO_SOCKET_IFNAME is on a machine. The machines before it have told the others their addresses."""
    with monkeypatch.context() as patch:
        for name, value in {"GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes, "LOCAL_RANK": 0, "GLOO_SOCKET_IFNAME": own}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "node0")
        patch.setenv("MASTER_PORT", "29500")
        patch.setattr(distributed, "address_towards", lambda host: ROUTES[node].get(host, ""))
        patch.setattr(distributed, "interface_of", INTERFACES.get)
        distributed._reach_out(store)
        return os.environ["GLOO_SOCKET_IFNAME"]


def test_gloo_takes_the_interface_on_the_route_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    assert [interface_on(node, store, monkeypatch) for node in (2, 1, 0)] == ["bond0", "eth1", "ib0"]


def test_gloo_takes_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    assert interface_on(1, store, monkeypatch, own="eth7") == "eth7"
    assert interface_on(0, store, monkeypatch, nodes=2) == "ib0"  # which has learned the address all the same


def test_agents_of_one_machine_that_stand_for_several_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("address/1", "")
    assert interface_on(0, store, monkeypatch, nodes=2) in ("lo", "lo0")
