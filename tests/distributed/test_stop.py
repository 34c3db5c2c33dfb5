"""A stop signal ends a run in good order, wherever it arrives; continued, it is the run that never stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time

import pytest

from tests.conftest import STRATEGIES, TINY, TINY_CONVNET, Finished, Project, finish, metrics, our_processes, wait_for
from tests.distributed.test_exactness import losses
from tests.distributed.test_failure import FRAGILE, USE_FRAGILE, children, pid_of

pytestmark = pytest.mark.distributed

SLOW_TO_BUILD = """
import pathlib, time
from torch import nn

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        pathlib.Path("building").touch()
        time.sleep(60)
"""

BUSY = """
import os

def late(real, seconds):
    def function(*arguments):
        time.sleep(seconds)
        return real(*arguments)
    return function

if os.environ.get("RANK") == "0":  # not where the config is checked
    from ddp_train.rank import peers; from ddp_train.rank import rank as worker
    peers.Peers.dead_neighbour = late(peers.Peers.dead_neighbour, 0.3)  # the thread that takes the signal finds the other rank gone,
    worker._record_untrained_stop = late(worker._record_untrained_stop, 0.6)  # and the one that has let it go has not said so yet
"""


@pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)
def test_stopped_by_every_signal_and_resumed_it_is_bitwise_the_run_that_never_stopped(project: Project, strategy: str) -> None:
    """Three ranks, dropout and workers, as in the test of a killed run; the same run is stopped again and again."""
    command = [*TINY_CONVNET, "model.dropout=0.2", "loader.num_workers=1", "cluster=cpu", "cluster.processes_per_node=3"]
    command += ["trainer.max_steps=200", "trainer.max_epochs=null", "evaluation.every_steps=20", "trainer.log_every_steps=4"]
    command.append(f"strategy={strategy}")
    whole, stopped = project.folder / "outputs" / "whole", project.folder / "outputs" / "stopped"
    assert project.run(*command, "hydra.run.dir=outputs/whole").returncode == 0

    def stop(number: signal.Signals, *, rank: int | None = None) -> tuple[Finished, float]:
        """Stop the run, and send its command two more SIGTERM while it saves, as a supervisor does."""
        before = len(metrics(stopped)) if (stopped / "metrics.jsonl").exists() else 0
        process = project.start(*command, "hydra.run.dir=outputs/stopped")
        wait_for(lambda: (stopped / "metrics.jsonl").exists() and len(metrics(stopped)) > before + 4)
        os.kill(process.pid if rank is None else pid_of(rank, children(process.pid)[0]), number)
        started = time.monotonic()
        for _ in range(2):
            time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
        done = finish(process, timeout=30)
        return done, time.monotonic() - started

    for number, rank, status, code in (
        (signal.SIGINT, None, "interrupted", 130),
        (signal.SIGUSR2, 1, "preempted", 75),
    ):
        done, seconds = stop(number, rank=rank)
        assert done.returncode == code, done.output
        assert seconds < 10
        assert not our_processes(project.folder)
        result = json.loads((stopped / "result.json").read_text())
        assert result["status"] == status
        assert (stopped / f"checkpoints/step_{result['step']:08d}/COMPLETE").exists()
        assert f"stopped after step {result['step']}, saved; " in done.stdout
        assert not (stopped / "failure.json").exists()
        for log in (stopped / "logs").glob("rank_*"):
            assert "Traceback" not in log.read_text()

    assert project.run("resume", "outputs/stopped").returncode == 0
    assert losses(stopped) == losses(whole)
    assert losses(stopped, "eval") == losses(whole, "eval")
    assert json.loads((stopped / "result.json").read_text())["status"] == "completed"


@pytest.mark.long
def test_a_run_whose_walltime_ends_saves_and_ends_by_itself(project: Project) -> None:
    command = [*TINY, "trainer.max_steps=100000", "trainer.max_epochs=null", "cluster=cpu"]
    started = time.monotonic()
    done = project.run(*command, "cluster.walltime=00:00:16", "cluster.grace_s=1")
    assert done.returncode == 75, done.output
    assert 14 < time.monotonic() - started < 25
    run = project.the_run()
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "preempted"
    assert (run / f"checkpoints/step_{result['step']:08d}/COMPLETE").exists()
    assert "the walltime ends in cluster.grace_s=1 s\nstopped after step " in done.stdout


def test_a_run_whose_terminal_is_closed_saves_and_ends(project: Project) -> None:
    ours, its = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    command = project.command(*TINY, "trainer.max_steps=100000", "trainer.max_epochs=null", "cluster=cpu")
    process = subprocess.Popen(command, cwd=project.folder, stdin=its, stdout=its, stderr=its, preexec_fn=take_terminal)
    os.close(its)
    os.set_blocking(ours, False)

    def has_trained() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        return any((run / "metrics.jsonl").exists() and len(metrics(run)) > 9 for run in project.runs())

    wait_for(has_trained)
    os.close(ours)
    assert process.wait(timeout=20) == 75
    run = project.the_run()
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "preempted"
    assert (run / f"checkpoints/step_{result['step']:08d}/COMPLETE").exists()
    assert not (run / "failure.json").exists()


def test_a_second_ctrl_c_ends_a_run_that_hangs_at_once(project: Project) -> None:
    project.write("fragile.py", FRAGILE)
    process = project.start("model=mlp", *USE_FRAGILE, "+model.fault=sleep", "trainer.log_every_steps=1", "loader.num_workers=1")
    wait_for(lambda: any((run / "metrics.jsonl").exists() and len(metrics(run)) == 2 for run in project.runs()))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # rank 1 sleeps in its third step
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout=5)  # it would sleep for 100 s
    assert done.returncode == 130
    wait_for(lambda: not our_processes(project.folder), timeout_s=3)
    assert "Ctrl-C again" in done.stderr
    assert "nothing is saved" in done.stderr
    assert "The run failed" not in done.output
    result = json.loads((project.the_run() / "result.json").read_text())
    assert (result["status"], result["step"]) == ("interrupted", None)


def test_a_stop_before_training_ends_at_once_and_says_that_nothing_is_saved(project: Project) -> None:
    project.write("slow.py", SLOW_TO_BUILD + BUSY)
    process = project.start("model=mlp", "model._target_=slow.Slow", *USE_FRAGILE[1:5], "~model.num_classes")
    wait_for(lambda: (project.folder / "building").exists())
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout=15)  # it would build for 60 s
    assert done.returncode == 143, done.output
    assert "stopped before the first step, nothing to save" in done.stdout
    assert "Traceback" not in done.output
    assert json.loads((project.the_run() / "result.json").read_text())["status"] == "preempted"


def test_under_torchrun_a_stopped_run_has_neither_failed_nor_finished(project: Project) -> None:
    command = [*TINY, "trainer.max_steps=100000", "trainer.max_epochs=null", "loader.num_workers=1"]
    process = project.start(*command, torchrun=["--standalone", "--nproc-per-node=2", "--max-restarts=1"])
    wait_for(lambda: any((run / "metrics.jsonl").exists() and len(metrics(run)) > 3 for run in project.runs()))
    os.kill(pid_of(1, process.pid), signal.SIGTERM)
    done = finish(process, timeout=20)
    assert done.returncode == 1 and "torchrun now ends by SIGTERM" in done.stderr, done.output  # a scheduler takes 0 for finished
    assert done.stdout.count("stopped after step ") == 1 and "restart 1 of 1" not in done.output and "FAILED" not in done.output
    assert json.loads((project.the_run() / "result.json").read_text())["status"] == "preempted"
