"""A run that is done is scored on another number of ranks, and started again as an evaluation by torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.distributed.world import alone
from ddp_train.training.evaluation import evaluate
from tests.conftest import Project, metrics
from tests.unit.training.finished import finished

pytestmark = pytest.mark.distributed


def evaluated(run: Path) -> list[Path]:
    return sorted((run / "evaluations").iterdir())


def test_a_run_is_scored_on_three_ranks_as_on_one(project: Project) -> None:
    run = project.folder / "outputs/run"
    run.parent.mkdir()
    parts = finished(run)
    done = project.run("evaluate", "outputs/run", "cluster.processes_per_node=3")
    assert done.returncode == 0, done.output
    (folder,) = evaluated(run)
    (record,) = metrics(folder)
    expected = evaluate(parts, alone())
    assert expected is not None
    assert record["accuracy"] == expected["accuracy"]
    assert record["loss"] == pytest.approx(expected["loss"], rel=1e-12)
