"""What an agent tells its ranks."""

from __future__ import annotations

import pytest

from ddp_train.system import process_env
from ddp_train.system.process_env import SlurmStep, slurm_step


def test_a_rank_alone_in_the_environment_makes_no_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*process_env.OF_TORCHRUN, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")  # as a Kubernetes operator sets it for a whole pod
    assert not process_env.is_torchrun_worker()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert process_env.is_torchrun_worker()


def test_an_agent_that_says_nothing_of_restarts_has_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert process_env.is_last_attempt()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert not process_env.is_last_attempt()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert process_env.is_last_attempt()


@pytest.mark.parametrize(
    ("agent", "environment", "hangs"),
    [
        ("torchrun --nnodes=1:4 -m ddp_train", {}, True),
        ("torchrun --nnodes 2:3 -m ddp_train", {}, True),
        ("torchrun -m ddp_train", {"PET_NNODES": "1:2"}, True),
        ("torchrun --nnodes=1:4 -m ddp_train", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ("torchrun --nnodes=2 -m ddp_train", {}, False),
        ("torchrun --nnodes=2:2 -m ddp_train", {}, False),
        ("torchrun --standalone -m ddp_train", {"PET_NNODES": "2"}, False),
    ],
)
def test_torch_waits_for_ever_for_a_machine_that_joins_a_range_without_the_variable(
    agent: str, environment: dict[str, str], hangs: bool
) -> None:
    assert process_env.joining_hangs(agent, environment) == hangs


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def test_a_task_knows_its_step() -> None:
    assert slurm_step(STEP) == SlurmStep(id="7.0.0", node_rank=1, hosts=("node1", "node2"), most_tasks=1)
    assert slurm_step({**STEP, "SLURM_RESTART_COUNT": "3"}).id == "7.0.3"  # type: ignore[union-attr]
    assert slurm_step({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"}).most_tasks == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [None, "4294967291", "4294967290", "batch"])
def test_a_batch_script_is_no_step(number: str | None) -> None:
    environment = {name: value for name, value in {**STEP, "SLURM_STEP_ID": number, "SLURM_PROCID": "0"}.items() if value is not None}
    assert slurm_step(environment) is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("gpu[08-11],login", ["gpu08", "gpu09", "gpu10", "gpu11", "login"]),
        ("a[1-2]b[3-4]-x", ["a1b3-x", "a1b4-x", "a2b3-x", "a2b4-x"]),
    ],
)
def test_lists_of_hosts_are_expanded_as_slurm_does(text: str, hosts: list[str]) -> None:
    found = slurm_step({**STEP, "SLURM_STEP_NODELIST": text})
    assert found is not None and list(found.hosts) == hosts
