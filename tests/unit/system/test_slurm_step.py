"""What SLURM's variables say of a step."""

from __future__ import annotations

import pytest

from ddp_train.system.slurm_step import SlurmStep, slurm_step

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
