"""Names of interfaces in gloo's and in NCCL's own words."""

from __future__ import annotations

import pytest

from ddp_train.launch.node.interfaces import interface_problems, taken_by_nccl

HERE = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.0.0.2"], "ib0": [], "docker0": ["172.17.0.1"]}


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("", ["eth0", "eth1"]),
        ("eth", ["eth0", "eth1"]),
        ("eth1,docker", ["eth1", "docker0"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^docker,lo,veth", ["eth0", "eth1"]),
        ("^=eth0,lo", ["eth1", "docker0"]),
        ("ib", []),  # is there, without an address
        ("^e,l,d", []),
    ],
)
def test_which_interfaces_nccl_may_take(wanted: str, taken: list[str]) -> None:
    assert taken_by_nccl(wanted, HERE) == taken


@pytest.mark.parametrize(
    ("environment", "uses_gpu", "said"),
    [
        ({}, True, []),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, True, []),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, False, ["GLOO_SOCKET_IFNAME=eth7 names eth7, which is not there; this machine has lo, eth0"]),
        ({"GLOO_SOCKET_IFNAME": "eth"}, False, ["names eth, which is not there"]),  # gloo wants the whole name
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, False, ["names ib0, which has no address"]),
        ({"NCCL_SOCKET_IFNAME": "bond"}, True, ["NCCL_SOCKET_IFNAME=bond leaves no interface with an address"]),
        ({"NCCL_SOCKET_IFNAME": "bond"}, False, []),  # nobody asks it
        ({"NCCL_SOCKET_IFNAME": "^docker,lo,veth"}, True, []),
    ],
)
def test_an_interface_that_is_not_there_is_named(environment: dict[str, str], uses_gpu: bool, said: list[str]) -> None:
    found = list(interface_problems(environment, HERE, uses_gpu=uses_gpu))
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True)), found
