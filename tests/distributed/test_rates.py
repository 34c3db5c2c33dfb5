"""Rates by group and by metric: the same on any number of ranks, and stopped, killed and resumed as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]

COMMAND = [
    *(*TINY, "model.depth=3", "cluster=cpu", "trainer.max_steps=24", "trainer.max_epochs=null", "trainer.global_batch_size=24"),
    *("scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=0.02", "scheduler.factor=0.5", "scheduler.metric=loss"),
    *("evaluation.every_steps=3", "checkpoint.every_steps=4", "health.check_replicas_every_steps=4"),
    *("optimizer.lr=0.01", "optimizer.layer_decay=0.8"),
    *("+optimizer.groups.bias={match: '*.bias', lr: 0.002}", "+optimizer.groups.low={match: hidden.0, freeze: true}"),
]


def values(run: Path) -> list[tuple[Any, ...]]:
    """Return what a run has recorded, but for its times."""
    return [tuple(record.get(name) for name in ("split", "step", "samples", "loss", "lr", "accuracy")) for record in metrics(run)]


def test_stopped_killed_and_resumed_is_bitwise_the_run_that_never_stopped(project: Project) -> None:
    command = [*COMMAND, "cluster.processes_per_node=3"]
    whole = project.run(*command, "hydra.run.dir=outputs/whole", timeout=400)
    assert whole.returncode == 0, whole.output
    expected = values(project.folder / "outputs" / "whole")
    assert len({rate for *_, rate, _ in expected if rate}) > 2  # the metric has cut it

    parts = project.folder / "outputs" / "parts"
    stopped = project.run(*command, "hydra.run.dir=outputs/parts", "debug.faults=[{kind: sigterm, rank: 1, step: 9}]", timeout=400)
    assert stopped.returncode == 75, stopped.output
    killed = project.run("resume", str(parts), "debug.faults=[{kind: kill, rank: 2, step: 17}]", timeout=400)
    assert killed.returncode not in (0, 75), killed.output
    resumed = project.run("resume", str(parts), "debug.faults=[]", timeout=400)
    assert resumed.returncode == 0, resumed.output
    assert values(parts) == expected


def test_one_two_and_three_ranks_and_a_sweep_have_the_same_rates(project: Project) -> None:
    runs = {}
    for ranks in (1, 2, 3):
        done = project.run(*COMMAND, f"cluster.processes_per_node={ranks}", f"hydra.run.dir=outputs/{ranks}", timeout=400)
        assert done.returncode == 0, done.output
        runs[ranks] = values(project.folder / "outputs" / str(ranks))
    for ranks in (2, 3):
        for mine, theirs in zip(runs[1], runs[ranks], strict=True):
            assert (theirs[:3], theirs[4:]) == (mine[:3], mine[4:])  # the rates to the bit
            assert theirs[3] == pytest.approx(mine[3], rel=1e-5)
    swept = project.run("-m", *COMMAND, "seed=1,0", "cluster.processes_per_node=2", "hydra.sweep.dir=outputs/sweep", timeout=400)
    assert swept.returncode == 0, swept.output
    assert values(project.folder / "outputs" / "sweep" / "1") == runs[2]
