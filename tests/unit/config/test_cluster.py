"""Where machines meet: from the config, or else from what torchrun's users and Kubernetes operators set."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ddp_train import CONF
from ddp_train.config.cluster import environment_of, max_restarts, processes_given, processes_of_nodes
from ddp_train.errors import ConfigError
from tests.unit.config.clusters import SILENT, cluster_with, found

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize(
    ("environment", "cluster", "expected"),
    [
        ({}, {"nodes": 2, "rendezvous_endpoint": "node0:1", "node_rank": 1}, ("node0", (1,), 1, (2, 2))),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "pod-0:23456", "PET_RDZV_BACKEND": "c10d"}, {}, ("pod-0", (23456,), None, (1, 4))),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "7"}, {}, ("m", (7,), 1, (2, 2))),
        ({"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "m"}, {}, ("m", (29500,), 2, (3, 3))),
        ({"NNODES": "3", "MASTER_ADDR": "m", "MASTER_PORT": "5"}, {}, ("m", (5,), None, (3, 3))),
        ({"NNODES": "2:3", "NODE_RANK": "2", "MASTER_ADDR": "m", "MASTER_PORT": "5"}, {}, ("m", (5,), 2, (2, 3))),
        (
            {"PET_NNODES": "9", "PET_RDZV_ENDPOINT": "theirs:1"},
            {"nodes": 2, "rendezvous_endpoint": "ours"},
            ("ours", (29400,), None, (2, 2)),
        ),
        ({}, {"nodes": 2, "rendezvous_endpoint": "[fd00::1]:7"}, ("fd00::1", (7,), None, (2, 2))),
        ({"PET_NNODES": "1", "MASTER_ADDR": "m", "MASTER_PORT": "5"}, {}, ("", (), None, (1, 1))),
        ({**STEP, "MASTER_ADDR": "m", "MASTER_PORT": "5", "NODE_RANK": "0"}, {}, ("m", (5,), 0, (2, 2))),
    ],
)
def test_what_the_config_leaves_out_is_read_from_the_environment(
    environment: dict[str, str], cluster: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    result = found(environment, **cluster)
    assert (result.host, result.ports, result.node_rank, (result.min_nodes, result.max_nodes)) == expected
    assert result.is_alone == (expected[0] == "")


def test_a_step_of_slurm_says_where_its_tasks_meet() -> None:
    second, first = found(STEP), found({**STEP, "SLURM_NODEID": "0"})
    assert (second.host, second.node_rank, second.max_nodes, second.launch_id, second.hosts) == ("n1", 1, 2, "7.0.0", ("n1", "n2"))
    assert first.ports == second.ports and len(set(first.ports)) == 8 and all(10_000 <= port < 30_000 for port in first.ports)
    assert found({**STEP, "SLURM_STEP_ID": "1"}).ports != first.ports  # another step of the same job
    assert found({**STEP, "SLURM_STEP_NODELIST": "n1"}).is_alone


@pytest.mark.parametrize(
    ("environment", "cluster", "key", "said"),
    [
        ({}, {"nodes": 2}, "cluster.rendezvous_endpoint", "neither PET_RDZV_ENDPOINT nor MASTER_ADDR"),
        ({}, {"nodes": 2, "rendezvous_endpoint": "node0:port"}, "cluster.rendezvous_endpoint", "HOST:PORT"),
        ({"PET_RDZV_ENDPOINT": "node0:70000"}, {"nodes": 2}, "PET_RDZV_ENDPOINT", "1 to 65535"),
        ({"PET_NNODES": "two"}, {}, "PET_NNODES", "MIN:MAX"),
        ({"NODE_RANK": "2", "MASTER_ADDR": "m"}, {"nodes": 2}, "NODE_RANK", "of 2 machines"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environment: dict[str, str], cluster: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        found(environment, **cluster)
    assert raised.value.key == key
    assert said in str(raised.value)


def test_an_operators_restarts_and_processes_are_taken_where_the_config_has_none() -> None:
    environment = {"PET_MAX_RESTARTS": "7", "PET_NPROC_PER_NODE": "4"}
    assert (max_restarts(SILENT, environment), processes_given(SILENT, environment)) == (7, 4)
    ours = cluster_with(max_restarts=0, processes_per_node=2)
    assert (max_restarts(ours, environment), processes_given(ours, environment)) == (0, 2)
    assert processes_given(SILENT, {"PET_NPROC_PER_NODE": "auto"}) is None
    assert processes_given(SILENT, {"NPROC_PER_NODE": "3"}) == 3


def test_the_batch_is_reckoned_with_the_processes_that_the_environment_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert processes_of_nodes(cluster_with(launcher="machines", nodes=2)) == (3, 3)
    assert processes_of_nodes(cluster_with(launcher="local", processes_per_node=1)) == (1,)


def test_values_of_the_environment_become_text() -> None:
    env = {"A": 1, "B": True, "C": False, "D": "x", "E": None, "F": 0.5}
    assert environment_of(env) == {"A": "1", "B": "1", "C": "0", "D": "x", "F": "0.5"}


@pytest.mark.parametrize("preset", ["aws_p4d_efa", "aws_p5_efa"])
def test_the_presets_for_efa_fit_pods_and_older_installers(preset: str) -> None:
    found = environment_of(yaml.safe_load((CONF / f"cluster/{preset}.yaml").read_text())["env"])
    assert found["NCCL_SOCKET_IFNAME"] == "^docker,lo,veth"
    assert found["FI_EFA_SET_CUDA_SYNC_MEMOPS"] == "0"


def test_what_the_user_says_of_cublas_and_nccl_wins() -> None:
    assert environment_of({}, deterministic=True) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
    environment = environment_of({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}, deterministic=True)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}
    environment = environment_of({}, deterministic=True, inherited={"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert environment_of({}) == {}
