"""What the ranks are given of a job; and when a job has to stop for the time limit of the place where it runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.launch import restart_note
from ddp_train.launch.job import Evaluation, Job, RankProgram, Training, stops_at
from ddp_train.run_folder.paths import RunFolder
from tests.unit.config.clusters import cluster_with
from tests.unit.parts import checked

OWN = cluster_with(walltime="00:10:00", grace_s=30)


def test_the_hyper_parameters_are_what_was_typed(tmp_path: Path) -> None:
    typed = ["optimizer.lr=1e-1", "+model.depth=3", "model=mlp", "~metrics.tensorboard", "hydra.run.dir=x", "name=null", "experiment=mine"]
    tree: Any = {"optimizer": {"lr": 0.1, "eps": 1e-8}, "model": {"depth": 3}, "name": None, "seed": 1}
    config: Any = SimpleNamespace(tree=tree)
    job = Job(config=config, run_folder=RunFolder(tmp_path), command=[], overrides=typed)
    expected = {"optimizer.lr": 0.1, "model.depth": 3, "model": "mlp", "name": "null", "experiment": "mine"}
    assert job.hyper_parameters() == expected


@pytest.mark.parametrize("work", [Training(checkpoint="a"), Evaluation(run="a", checkpoint="b", watches=True), RankProgram(function="a.b")])
def test_a_job_arrives_as_it_was_sent(work: Training | Evaluation | RankProgram, tmp_path: Path) -> None:
    job = Job(config=checked(), run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=["seed=1"], work=work)
    received = Job.from_json(job.to_json())
    assert (received.work, received.is_resumable) == (work, not isinstance(work, RankProgram))
    assert received.continues_from == (Path("a") if isinstance(work, Training) else tmp_path)
    assert received.to_json() == job.to_json() == received.resumed_from(received.continues_from).to_json()


def test_a_run_stops_so_long_before_its_time_is_up_as_saving_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_note, "STARTED", started := float(int(time.time())))
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert stops_at(OWN) == started + 570
    assert stops_at(replace(OWN, walltime=None)) is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{started + 4000:.0f}")
    assert stops_at(OWN) == started + 570  # a shorter one of the user's own, within an allocation
    assert stops_at(replace(OWN, walltime=None)) == started + 3970
    assert stops_at(replace(OWN, launcher="slurm")) == started + 3970  # the walltime is what SLURM was asked for
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{started - 1:.0f}")
    assert stops_at(replace(OWN, walltime=None)) is None  # of an allocation that is over


@pytest.mark.parametrize("answers", [True, False])
def test_an_end_that_was_moved_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: bool) -> None:
    moved = int(time.time()) + 8000
    squeue = tmp_path / "squeue"
    line = f"7|RUNNING|None|node1|N/A|{datetime.fromtimestamp(moved):%Y-%m-%dT%H:%M:%S}"
    squeue.write_text(
        f"#!/bin/bash\necho '{line}'\n" if answers else "#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{moved - 4000}")
    cluster = replace(OWN, launcher="slurm")
    assert stops_at(cluster) == moved - 4030
    assert stops_at(cluster, asks_slurm=True) == (moved - 30 if answers else moved - 4030)
