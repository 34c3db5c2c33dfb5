"""Sweeps on the real SLURM: an array for which nobody waits, and a sweeper that waits, is killed, and taken up."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_train.launch.engine.engine import Submission
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep
from tests.cluster.slurm import Slurm
from tests.cluster.slurm_project import SlurmProject, logs, make
from tests.conftest import FEW

SMALL = ["cluster=slurm", "cluster.device=cpu", "cluster.processes_per_node=1", "cluster.grace_s=5", "hydra.sweep.dir=sweep"]
SMALL += [*FEW, "model=mlp", "trainer.max_epochs=null", "trainer.max_steps=3"]

FRAGILE = """
from ddp_train.errors import ConfigError
from ddp_train.model.mlp import MLP

class Fragile(MLP):
    def __init__(self, *given, width, **rest):
        super().__init__(*given, width=width, **rest)
        if width == 9:
            raise ERROR
"""


@pytest.fixture
def project(slurm: Callable[..., Slurm], tmp_path: Path) -> SlurmProject:
    return make(slurm(3), tmp_path)


def statuses(project: SlurmProject) -> list[str]:
    """Return the statuses that `ddp-train runs` shows, by the jobs' numbers."""
    rows = [json.loads(line) for line in project.type("runs", "sweep", "--json").stdout.splitlines()]
    return [row["status"] for row in sorted(rows, key=lambda row: int(Path(row["folder"]).name))]


def submissions(project: SlurmProject) -> list[str]:
    sweep = Sweep.load(project.folder / "sweep")
    found = [Submission.read(sweep.run_folder(job)) for job in sweep.jobs]
    return [each.id for each in found if each is not None]


def ends(project: SlurmProject, *, within_s: float = 900) -> None:
    """Wait until SLURM has nothing left to do; see that no more than two jobs ran at a time."""

    def is_empty() -> bool:
        running = project.bed.must("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").split()
        assert len(running) <= 2, running
        return project.bed.must("squeue", "--noheader") == ""

    project.wait(is_empty, "an empty queue", within_s=within_s)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.cluster), pytest.param(6, marks=pytest.mark.cluster_long)])
def test_an_array_runs_by_itself_and_resume_runs_what_failed(project: SlurmProject, count: int) -> None:
    error, restarts, bad = ("ConfigError(happened='no width')", 0, 1) if count == 2 else ("ValueError('no width')", 3, 1)
    (project.folder / "fragile.py").write_text(FRAGILE.replace("ERROR", error))
    swept = [
        "-m",
        *SMALL,
        "model._target_=fragile.Fragile",
        "sweep.parallel_jobs=2",
        f"model.width={','.join(map(str, range(8, 8 + count)))}",
    ]
    done = project.type(*swept)
    assert done.returncode == 0, done.output
    assert f"submitted as job 1: {count} jobs of sweep, 2 at a time" in done.stdout
    assert submissions(project) == [f"1_{number}" for number in range(count)]
    ends(project)
    table = (project.folder / "sweep/sweep.csv").read_text()  # nobody has asked yet: the jobs keep it
    assert [table.count(f",{status},") for status in ("completed", "failed", "queued", "running")] == [count - 1, 1, 0, 0], table
    shown = project.type("runs", "sweep")
    assert shown.returncode == 1, shown.output
    assert statuses(project) == ["failed" if number == bad else "completed" for number in range(count)], logs(project.folder)
    assert shown.stdout.count(" completed ") == count - 1
    assert [int(project.bed.job(f"1_{each}")["Restarts"]) for each in range(count)] == [restarts * (each == bad) for each in range(count)]

    (project.folder / "fragile.py").write_text(FRAGILE.replace("if width == 9:", "if False:"))
    again = project.type("resume", "sweep")
    assert again.returncode == 0 and len(re.findall("^submitted as job", again.stdout, re.MULTILINE)) == 1, again.output
    ends(project)
    assert project.type("runs", "sweep").returncode == 0
    assert statuses(project) == ["completed"] * count, logs(project.folder)
    assert [id for number, id in enumerate(submissions(project)) if number != bad] == [f"1_{each}" for each in range(count) if each != bad]
    assert project.type("resume", "sweep").returncode == 0 and project.bed.must("squeue", "--noheader") == ""


@pytest.mark.cluster_long
def test_cancel_ends_all_jobs_and_none_is_requeued(project: SlurmProject) -> None:
    slow = "+debug.faults=[{kind:slow,seconds:0.2,attempt:every}]"
    done = project.type("-m", *SMALL[:-1], "trainer.max_steps=2000", slow, "seed=1,2,3", "sweep.parallel_jobs=2")
    assert done.returncode == 0, done.output
    project.trains(RunFolder(project.folder / "sweep/0"), beyond=2)
    cancelled = project.type("cancel", "sweep")
    assert cancelled.returncode == 0 and "`ddp-train resume sweep` continues it" in cancelled.stdout, cancelled.output
    ends(project)
    assert "never: cancelled" in project.type("verdict", "sweep/0").stdout
    assert RunFolder(project.folder / "sweep/0").saved_steps() and statuses(project)[2] == "interrupted"
    assert project.bed.job("1_0")["Restarts"] == "0"


@pytest.mark.cluster_long
def test_a_sweeper_that_waits_can_be_killed_and_loses_nothing(project: SlurmProject) -> None:
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    swept = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.sampler.seed=1", *SMALL]
    swept += ["sweep.parallel_jobs=2", "optimizer.lr=tag(log,interval(0.0001,0.1))"]
    sweep = project.folder / "sweep"
    driver = project.start(sys.executable, "-m", "ddp_train", *swept)
    project.wait(lambda: RunFolder(sweep / "3").submitted.exists(), f"four trials: {driver.output}", within_s=240)
    driver.kill()
    known = submissions(project)
    done = project.type("resume", "sweep", timeout=400)
    assert done.returncode == 0, done.output + logs(project.folder)
    jobs = Sweep.load(sweep).jobs
    assert [(str(job.status), job.attempts) for job in jobs] == [("completed", 1)] * 6
    assert len({tuple(job.overrides) for job in jobs}) == 6 and all(job.metric is not None for job in jobs)
    assert submissions(project)[: len(known)] == known  # what was submitted before went on
    assert len(set(submissions(project))) == 6 and sorted(submissions(project), key=int) == [str(number) for number in range(1, 7)]
    assert "best     job" in done.stdout
