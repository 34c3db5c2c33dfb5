"""Which machine is the first one, where machines are started by hand."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.node.place import Place
from ddp_train.launch.torchrun import _of_a_command_line, _place
from tests.unit.config.clusters import SILENT
from tests.unit.launch.node.machines import facts


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def place(port: int, node_rank: int | None = None, host: str = "127.0.0.1") -> Place:
    found = _place(replace(SILENT, launcher="torchrun", nodes=2, rendezvous_endpoint=f"{host}:{port}", node_rank=node_rank))
    assert found is not None
    return found


def test_who_binds_the_endpoint_first_is_the_first_machine(free_port: int) -> None:
    first, second = place(free_port), place(free_port)
    assert first.is_first and first.listener is not None and first.listener.getsockname() == ("127.0.0.1", free_port)
    assert not second.is_first and second.addresses == (("127.0.0.1", free_port),)
    first.listener.close()


def test_a_number_decides(free_port: int) -> None:
    assert not place(free_port, node_rank=1).is_first
    first = place(free_port, node_rank=0, host="name.of.a.gateway.invalid")  # which is not this machine's own
    assert first.is_first and first.listener is not None
    with pytest.raises(EnvironmentRefuses, match="cannot be listened at: Address already in use"):
        place(free_port, node_rank=0)
    first.listener.close()


def test_a_machine_elsewhere_follows(free_port: int) -> None:
    assert not place(free_port, host="192.0.2.1").is_first


def test_one_machine_alone_meets_nobody() -> None:
    assert _place(replace(SILENT, launcher="torchrun", nodes=1)) is None


def test_of_a_command_line_what_is_each_machines_own_is_left_out() -> None:
    one, other = (_of_a_command_line(facts(), ["-m", "seed=1,2", f"cluster.node_rank={number}"]) for number in (0, 1))
    assert one.config == other.config == {"the command line": "-m seed=1,2"}
