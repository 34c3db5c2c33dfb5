"""Checkpoints by the clock, by steps and by how good they are; the best one by its name; and a refusal before training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.distributed

RUN = [*TINY, "cluster=cpu", "cluster.processes_per_node=3", "trainer.max_steps=60", "trainer.max_epochs=null"]
POLICY = ["evaluation.every_steps=4", "checkpoint.every_evaluation=false", "checkpoint.every_minutes=0.0001"]
POLICY += ["checkpoint.keep_last=1", "checkpoint.keep_best=2"]


def steps_saved(run: Path, rank: int) -> list[int]:
    return [int(step) for step in re.findall(r"the checkpoint of step (\d+) is written", (run / f"logs/rank_{rank:05d}.log").read_text())]


def manifests(run: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads((path / "manifest.json").read_text()) for path in sorted((run / "checkpoints").glob("step_*"))]
    return {manifest["step"]: manifest["facts"] for manifest in found}


@pytest.mark.long
def test_all_ranks_follow_the_clock_and_the_best_is_kept_and_found_by_name(project: Project) -> None:
    done = project.run(*RUN, *POLICY, "checkpoint.metric=eval/loss", "optimizer.lr=0.02")
    assert done.returncode == 0, done.output
    run = project.the_run()
    saved = steps_saved(run, 0)
    assert steps_saved(run, 1) == steps_saved(run, 2) == saved
    losses = {record["step"]: record["loss"] for record in metrics(run, "eval")}
    by_the_clock = [step for step in saved if step not in losses]
    assert len(by_the_clock) > 2, saved
    best = sorted((loss, step) for step, loss in losses.items() if step in saved)[:2]
    assert sorted(losses.values())[:2] == [loss for loss, _ in best]  # no better one went unsaved
    assert manifests(run).keys() == {60} | {step for _, step in best}
    for loss, step in best:
        facts = manifests(run)[step]
        assert facts["metrics"]["eval/loss"] == loss
        assert facts["ranked_by"] == {"metric": "eval/loss", "goal": "min"}

    done = project.run("resume", f"{run}/checkpoints/best", "trainer.max_steps=61")
    assert done.returncode == 0, done.output
    assert f"resumed  after step {best[0][1]}," in done.output

    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()
    before = len(metrics(run))
    done = project.run("resume", str(run), "trainer.max_steps=62")
    assert done.returncode == 78, done.output
    assert "cannot be written" in done.output
    assert len(metrics(run)) == before
