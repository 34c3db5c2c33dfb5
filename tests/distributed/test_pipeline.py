"""Runs of which one comes after the other, as real processes."""

from __future__ import annotations

import signal
import subprocess

import pytest

from ddp_train.errors import ENVIRONMENT_REFUSES, INTERRUPTED, PREEMPTED
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import mark_cancelled
from tests.conftest import TINY, Project, finish, metrics, wait_for

pytestmark = pytest.mark.distributed

ONE = [*TINY, "cluster.processes_per_node=1"]
LATER = [*ONE, "after=first", "trainer.max_steps=3"]


@pytest.fixture
def half(project: Project) -> Project:
    """Give a folder with a run that was stopped on its way."""
    first = project.start(*ONE, "hydra.run.dir=first", "trainer.max_steps=12", "debug.faults=[{kind:slow,seconds:0.25}]")
    wait_for(lambda: (project.folder / "first/metrics.jsonl").exists())
    first.send_signal(signal.SIGTERM)
    assert finish(first).returncode == PREEMPTED
    return project


def waits(process: subprocess.Popen[str]) -> str:
    """Return the line in which a command says that it waits."""
    assert process.stderr is not None
    return next(line for line in process.stderr if line.startswith("waiting for "))


@pytest.mark.long
def test_it_waits_is_stopped_waits_again_and_begins_with_the_best_weights(half: Project) -> None:
    stopped = half.start(*LATER, "hydra.run.dir=second", "init_from=first/checkpoints/best")
    assert waits(stopped).startswith("waiting for first: not running: stopped in good order; it continues from step ")
    stopped.send_signal(signal.SIGINT)
    ended = finish(stopped)
    assert ended.returncode == INTERRUPTED and "`ddp-train resume second` waits again" in ended.stderr
    again = half.start("resume", "second")
    assert waits(again).startswith("waiting for first: not running: ")
    assert half.run("resume", "first").returncode == 0
    began = finish(again)
    assert began.returncode == 0, began.output
    assert "first is done" in began.stderr and "tensors from first/checkpoints/step_0000" in began.stdout
    assert metrics(half.folder / "first")[-1]["time"] < metrics(half.folder / "second")[0]["time"]
    assert half.run("resume", "second", "trainer.max_steps=4").returncode == 0


@pytest.mark.long
def test_a_run_that_never_gets_done_ends_what_comes_after_it(half: Project) -> None:
    waiting = half.start(*LATER, "hydra.run.dir=second")
    waits(waiting)
    mark_cancelled(RunFolder(half.folder / "first"))
    ended = finish(waiting)
    assert ended.returncode == ENVIRONMENT_REFUSES, ended.output
    assert "after: first does not get done: cancelled by" in ended.stderr
    third = half.run(*ONE, "hydra.run.dir=third", "after=second")
    assert third.returncode == ENVIRONMENT_REFUSES and "after: second does not get done" in third.stderr
    assert not (half.folder / "third").exists()


@pytest.mark.long
def test_a_sweep_waits_before_its_first_job(half: Project) -> None:
    sweep = half.start("-m", *LATER, "optimizer.lr=0.1,0.01")
    waits(sweep)
    assert half.run("resume", "first").returncode == 0
    ended = finish(sweep)
    assert ended.returncode == 0, ended.output
    times = [metrics(run)[0]["time"] for run in half.runs() if "sweeps" in str(run)]
    assert len(times) == 2 and min(times) > metrics(half.folder / "first")[-1]["time"]
