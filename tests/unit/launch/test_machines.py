"""Which machine is the first one, where machines are started by hand."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.machines import meet_machines
from ddp_train.launch.node.this_node import NodeRendezvous
from ddp_train.launch.node_facts.facts import of_a_command_line
from tests.unit.config.clusters import cluster_with
from tests.unit.launch.node_facts.machines import facts


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def place(port: int, node_rank: int | None = None, host: str = "127.0.0.1") -> NodeRendezvous:
    found = meet_machines(cluster_with(launcher="machines", nodes=2, rendezvous_endpoint=f"{host}:{port}", node_rank=node_rank))
    assert found is not None
    return found


def test_who_binds_the_endpoint_first_is_the_first_machine(free_port: int) -> None:
    first, second = place(free_port), place(free_port)
    assert first.is_first and first.listener is not None and first.listener.getsockname() == ("127.0.0.1", free_port)
    assert not second.is_first and second.registry_addresses() == (("127.0.0.1", free_port),)
    first.listener.close()


def test_a_number_decides(free_port: int) -> None:
    assert not place(free_port, node_rank=1).is_first
    first = place(free_port, node_rank=0, host="name.of.a.gateway.invalid")  # which is not this machine's own
    assert first.is_first and first.listener is not None
    with pytest.raises(EnvironmentRefuses, match=r"cannot listen at .*: Address already in use"):
        place(free_port, node_rank=0)
    first.listener.close()


def test_a_machine_elsewhere_follows(free_port: int) -> None:
    assert not place(free_port, host="192.0.2.1").is_first


def test_one_machine_alone_meets_nobody() -> None:
    assert meet_machines(cluster_with(launcher="machines", nodes=1)) is None


def test_of_a_command_line_what_is_each_machines_own_is_left_out() -> None:
    one, other = (of_a_command_line(facts(), ["-m", "seed=1,2", f"cluster.node_rank={number}"]) for number in (0, 1))
    assert one.config == other.config == {"the command line": "-m seed=1,2"}


VARIABLES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}


def multinode(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a torchrun that says what it was given (the real one: tests/cluster/test_torchrun_hosts.py)."""
    program = folder / "torchrun"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@" "${PET_NNODES-}" "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE-}"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    script = Path(__file__).parents[3] / "launch/multinode.sh"
    return subprocess.run(["bash", str(script), "a b", "seed=1"], env=environment, capture_output=True, text=True)


def test_the_script_is_torchrun_with_its_variables_and_the_meeting_that_fits(tmp_path: Path) -> None:
    said = multinode(tmp_path, **VARIABLES, NPROC_PER_NODE="3", PET_NNODES="9").stdout.splitlines()
    assert said[:2] == ["--nnodes=2", "--nproc-per-node=3"] and said[-6:] == ["-m", "ddp_train", "a b", "seed=1", "", ""]
    assert said[2:-6] == ["--node-rank=1", "--master-addr=node0", "--master-port=29400", "--max-restarts=0"]
    said = multinode(tmp_path, **{**VARIABLES, "NNODES": "1:4"}, NPROC_PER_NODE="3").stdout.splitlines()
    assert said[0] == "--nnodes=1:4" and said[-1] == "1"
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-conf=is_host=0", "--max-restarts=10"} <= {*said}


@pytest.mark.parametrize(
    ("name", "value"), [*((name, "") for name in VARIABLES), ("NNODES", "two"), ("MASTER_PORT", "x"), ("NPROC_PER_NODE", "gpu")]
)
def test_the_script_names_a_variable_that_is_wrong(tmp_path: Path, name: str, value: str) -> None:
    said = multinode(tmp_path, **{**VARIABLES, name: value})
    assert said.returncode == 2 and said.stdout == ""
    assert said.stderr.startswith(f"{name} is '{value}': expected ") and "NODE_RANK       which one" in said.stderr
