"""Three signals, to three targets, at four moments: each time saved, 75, nothing left behind, and no step lost or repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import Project, finish, metrics, our_processes, wait_for
from tests.distributed.test_failure import children, pid_of
from tests.distributed.test_restart import THREE, numbers, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.long]

SLOW = """
import os, time
from pathlib import Path
from ddp_train.model.mlp import MLP

class Slow(MLP):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        Path(f"built_{os.getpid()}").touch()
        time.sleep(float(os.environ.get("BUILDS_S", 0)))

    def forward(self, images):
        if not self.training and os.environ["RANK"] == "0":
            Path("evaluating").touch()
        time.sleep(0.02)
        return super().forward(images)
"""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TARGETS = ("launcher", "one rank", "all ranks")
PHASES = ("step", "evaluation", "save", "start")
RUN = ["model=mlp", "model._target_=slow.Slow", "model.width=600", "model.depth=3", "data.num_samples=1600", "data.eval.num_samples=101"]
RUN += ["evaluation.batch_size=4", "loader.num_workers=1", "trainer.max_epochs=null", "trainer.log_every_steps=1", "~metrics.tensorboard"]
RUN += ["scheduler=constant"]
RUN += ["checkpoint.every_steps=7", "evaluation.every_steps=5", *THREE, "loader.micro_batch_size=8", "hydra.run.dir=run"]


def busy() -> float:
    """Return how much slower than alone we may be, because others work here, too."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def last_step(run: Path) -> int:
    try:
        return int(max((record["step"] for record in metrics(run, "train")), default=0))
    except (OSError, ValueError):  # not there yet, or half a line
        return 0


def wait_for_phase(project: Project, phase: str, seen: int) -> None:
    """Wait until the run is at that moment, after the steps that it had taken when it was started."""
    run, mark = project.folder / "run", project.folder / "evaluating"
    if phase == "start":
        wait_for(lambda: len(list(project.folder.glob("built_*"))) == 3, timeout_s=300)
        return
    wait_for(lambda: last_step(run) > seen, timeout_s=300)
    if phase == "evaluation":
        mark.unlink(missing_ok=True)
        wait_for(mark.exists)
    elif phase == "save":
        wait_for(lambda: any((run / "checkpoints").glob(".partial_*")))


def send(process: subprocess.Popen[str], number: signal.Signals, target: str, draw: random.Random) -> None:
    ranks = [pid_of(rank, children(process.pid)[0]) for rank in range(3)]
    for pid in {"launcher": [process.pid], "one rank": [draw.choice(ranks)], "all ranks": ranks}[target]:
        os.kill(pid, number)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"], indirect=True)
def test_every_stop_is_saved_and_none_loses_a_step(project: Project, strategy: str) -> None:
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    cases = [*draw.sample([*product(SIGNALS, TARGETS, PHASES[:3])], 20), *product(SIGNALS, ["one rank"], ["start"])]
    cases.append((signal.SIGTERM, "launcher", "start"))
    print(f"\nseed {seed}, {strategy}")
    project.write("slow.py", SLOW)
    run, longest, resumed, command = project.folder / "run", 0.0, 0, [*RUN, f"strategy={strategy}"]
    for number, target, phase in cases:
        for mark in project.folder.glob("built_*"):
            mark.unlink()
        seen = last_step(run)
        process = project.start(*command, "trainer.max_steps=100000", env={"BUILDS_S": "60" if phase == "start" else "0"})
        wait_for_phase(project, phase, seen)
        send(process, number, target, draw)
        sent = time.monotonic()
        done = finish(process, timeout=60)
        seconds = time.monotonic() - sent
        assert seconds < 5 * busy()
        longest = max(longest, seconds)
        print(f"  {number.name:<7} {target:<9} in {phase:<10} -> {done.returncode} in {seconds:.1f} s, load {os.getloadavg()[0]:.1f}")
        assert done.returncode == 75, done.output  # in the start, too: what was there before is saved
        assert json.loads((run / "result.json").read_text())["status"] == "preempted"
        assert not (run / "failure.json").exists()
        wait_for(lambda: not our_processes(project.folder), timeout_s=2 * busy())
        resumed += 1
    print(f"  {resumed} of {len(cases)}; longest {longest:.1f} s")
    last = last_step(run) + 10
    done = project.run("resume", "run", f"trainer.max_steps={last}", timeout=600)
    assert done.returncode == 0, done.output
    (project.folder / "whole").mkdir()
    whole = Project(project.folder / "whole")
    whole.write("slow.py", SLOW)
    done = whole.run(*command, f"trainer.max_steps={last}", timeout=600)
    assert done.returncode == 0, done.output
    assert numbers(run) == numbers(whole.folder / "run")


def test_one_ctrl_c_saves_and_a_second_one_in_the_save_leaves_the_last_good_checkpoint(project: Project) -> None:
    project.write("slow.py", SLOW)
    run = project.folder / "run"
    command = [*RUN, "trainer.max_steps=100000"]
    process = project.start(*command)
    wait_for_phase(project, "step", 0)
    process.send_signal(signal.SIGINT)
    assert finish(process, timeout=30).returncode == 130
    saved = json.loads((run / "result.json").read_text())["step"]
    process = project.start(*command, "model.width=600")
    wait_for_phase(project, "save", saved)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # two at once would be one
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert finish(process, timeout=30).returncode in (130, -signal.SIGINT)  # to a shell the same; the second when all was done already
    assert time.monotonic() - sent < 2 * busy()
    wait_for(lambda: not our_processes(project.folder), timeout_s=2 * busy())
    done = project.run("resume", "run", f"trainer.max_steps={last_step(run) + 20}")
    assert done.returncode == 0, done.output
    assert "is not used" not in done.output  # every checkpoint that is there is whole
    steps = [record["step"] for record in metrics(run, "train")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_sweep_whose_time_is_up_can_be_resumed(project: Project) -> None:
    command = ["-m", "model=mlp", "model.width=16", "seed=1,2", "cluster=cpu", "trainer.max_epochs=null", "hydra.sweep.dir=sweep"]
    done = project.run(*command, "trainer.max_steps=100000", env={"SLURM_JOB_END_TIME": str(int(time.time()) + 60)})
    assert done.returncode == 75, done.output
    assert [json.loads((project.folder / "sweep/0/result.json").read_text())["status"]] == ["preempted"]
    assert "queued" in (project.folder / "sweep/sweep.json").read_text()


def test_under_torchrun_every_rank_ends_with_93(project: Project) -> None:
    prepare(project.folder)
    command = ["--config-dir=conf", "model=mlp", "+edited=lr", "model._target_=fragile.Fragile", "+model.expected=''"]
    command.append("+model.deaths=[always]")
    done = project.run(*command, torchrun=["--standalone", "--nproc-per-node=3", "--max-restarts=9"], timeout=600)
    assert done.returncode != 0
    assert done.output.count("No progress: ") == 1, done.output
    assert "exitcode  : 93" in done.output
    assert "restart 3 of 9" in done.output
