"""A batch that grows (`trainer.batch_size_schedule`): the same on any number of ranks, stopped and killed where its size changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]

COMMAND = [
    *(*TINY, "cluster=cpu", "trainer.max_steps=14", "trainer.max_epochs=null", "loader.micro_batch_size=8"),
    *(
        "trainer.global_batch_size=24",
        "trainer.batch_size_schedule={5: 48, 10: 65}",
        "evaluation.every_steps=7",
        "checkpoint.every_steps=4",
    ),
]


def values(run: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record.get(name) for name in ("split", "step", "samples", *names)) for record in metrics(run)]


def test_two_and_three_ranks_have_the_same_curve_and_a_stop_beside_the_change_of_size_none_of_its_own(project: Project) -> None:
    for ranks in (2, 3):
        done = project.run(*COMMAND, f"cluster.processes_per_node={ranks}", f"hydra.run.dir=outputs/{ranks}", timeout=400)
        assert done.returncode == 0, done.output
    two, three = (project.folder / "outputs" / f"{ranks}" for ranks in (2, 3))
    assert values(two) == values(three)
    sizes = [record["samples"] for record in metrics(two, "train")]
    assert [after - before for before, after in zip([0, *sizes[:-1]], sizes, strict=True)] == [24] * 5 + [48] * 5 + [65] * 4
    for name in ("loss", "accuracy"):
        mine, theirs = ([record[name] for record in metrics(run) if name in record] for run in (two, three))
        assert theirs == pytest.approx(mine, rel=1e-5)

    parts = project.folder / "outputs" / "parts"
    command = [*COMMAND, "cluster.processes_per_node=3", "hydra.run.dir=outputs/parts"]
    stopped = project.run(
        *command, "debug.faults=[{kind: sigterm, rank: 1, step: 4}]", timeout=400
    )  # within the last step of the first size
    assert stopped.returncode == 75, stopped.output
    killed = project.run("resume", str(parts), "debug.faults=[{kind: kill, rank: 2, step: 11}]", timeout=400)  # saved after step 8
    assert killed.returncode not in (0, 75), killed.output
    resumed = project.run("resume", str(parts), "debug.faults=[]", timeout=400)
    assert resumed.returncode == 0, resumed.output
    assert values(parts, "loss", "lr", "grad_norm") == values(three, "loss", "lr", "grad_norm")
