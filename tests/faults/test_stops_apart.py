"""Stops and saves by time of ranks that run ahead of each other, as they do where collectives do not block the host: each time one step
on all ranks, saved, and bitwise the run that was never stopped.

Local SGD communicates in every 20th step only, and rank 0 is the slowest. The arithmetic is exact: a step's
gradient is the weights themselves, times powers of two on the way, so that the result must not depend on the number of ranks either.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.conftest import Project, finish, our_processes, wait_for
from tests.distributed.test_failure import children, pid_of
from tests.distributed.test_restart import numbers
from tests.faults.test_stop_faults import busy, last_step

pytestmark = [pytest.mark.distributed, pytest.mark.long]

TIMES = 20
MODULE = """
import os, random, time
import torch
from torch import nn

class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(1000))
        self.draw = random.Random(os.getpid())
        self.longest_s = float(os.environ.get("LONGEST_S", 0)) * (4 if os.environ.get("RANK") == "0" else 1)
    def forward(self, images):
        time.sleep(self.longest_s * self.draw.random())
        return self.weights @ self.weights / 2

class Decay:
    def loss(self, model, batch):
        return model(batch[0])
"""
NODES = {"model/weights": "apart.Weights", "objective/decay": "apart.Decay"}
RUN = [
    "--config-dir=conf",
    "model=weights",
    "objective=decay",
    "strategy=local_sgd",
    "strategy.every_steps=20",
    "strategy.outer_lr=1.0",
    "strategy.outer_momentum=0.0",
    "optimizer=sgd",
    "scheduler=constant",
    "optimizer.lr=1e-4",
]
RUN += [
    "data.num_samples=960",
    "loader.drop_last=true",
    "data.eval=null",
    "loader.micro_batch_size=16",
    "trainer.max_epochs=null",
    "trainer.log_every_steps=20",
]
RUN += ["checkpoint.every_minutes=null", "~metrics.tensorboard", "hydra.run.dir=run"]
THREE = ["cluster=cpu", "cluster.processes_per_node=3"]
ENDLESS = "trainer.max_steps=1000000"
SLEEPS = {"LONGEST_S": "0.01"}


def prepare(project: Project) -> Path:
    project.write("apart.py", MODULE)
    for place, target in NODES.items():
        project.write(f"conf/{place}.yaml", f"_target_: {target}\n")
    return project.folder / "run"


def last_steps(run: Path) -> list[set[str]]:
    """Return what each rank's log says of the steps that were agreed on."""
    return [set(re.findall(r"all ranks (\w+ after step \d+)", log.read_text())) for log in sorted((run / "logs").glob("rank_*.log"))]


def check(project: Project, run: Path, *, command: list[str], torchrun: list[str] | None = None) -> None:
    """Check that no step was lost or repeated, and that the numbers are bitwise those of a run that was never stopped."""
    last = last_step(run) + 50
    done = project.run("resume", "run", f"trainer.max_steps={last}", torchrun=torchrun, timeout=600)
    assert done.returncode == 0, done.output
    whole = Project(project.folder / "whole")
    whole.folder.mkdir()
    prepare(whole)
    done = whole.run(*RUN, *command, f"trainer.max_steps={last}", timeout=600)
    assert done.returncode == 0, done.output
    assert numbers(run) == numbers(whole.folder / "run")


def check_stopped(project: Project, run: Path) -> int:
    result = json.loads((run / "result.json").read_text())
    assert (run / f"checkpoints/step_{result['step']:08d}/COMPLETE").exists()
    assert not (run / "failure.json").exists()
    of_ranks = last_steps(run)
    assert len(of_ranks) == 3 and of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert f"stop after step {result['step']}" in of_ranks[0]
    wait_for(lambda: not our_processes(project.folder), timeout_s=2 * busy())
    return int(result["step"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_ranks_that_run_ahead_of_each_other(project: Project, number: signal.Signals, code: int) -> None:
    run, draw = prepare(project), random.Random()
    for _ in range(TIMES):
        seen = last_step(run)
        process = project.start(*RUN, *THREE, ENDLESS, env=SLEEPS)
        wait_for(lambda seen=seen: last_step(run) > seen, timeout_s=300)
        time.sleep(draw.random() / 2)
        target = draw.choice([None, 0, 1, 2])
        os.kill(process.pid if target is None else pid_of(target, children(process.pid)[0]), number)
        sent = time.monotonic()
        done = finish(process, timeout=60)
        seconds = time.monotonic() - sent
        assert done.returncode == code, done.output
        print(
            f"  {number.name} to {'the launcher' if target is None else f'rank {target}'}: {check_stopped(project, run)}, {seconds:.1f} s"
        )
    check(project, run, command=THREE)


def test_the_walltime_stops_ranks_that_run_ahead_of_each_other(project: Project) -> None:
    run, starts = prepare(project), [20.0]
    for _ in range(TIMES):
        seen, started = last_step(run), time.monotonic()
        walltime_s = math.ceil(2 * statistics.median(starts[-3:])) + 3
        process = project.start(*RUN, *THREE, ENDLESS, "cluster.grace_s=1", f"cluster.walltime=00:00:{walltime_s:02d}", env=SLEEPS)
        wait_for(lambda seen=seen: last_step(run) > seen, timeout_s=300)
        starts.append(time.monotonic() - started)
        done = finish(process, timeout=120)
        assert done.returncode == 75, done.output
        print(f"  walltime {walltime_s} s: {check_stopped(project, run)}")
    check(project, run, command=THREE)


def test_ranks_that_run_ahead_of_each_other_save_by_time(project: Project) -> None:
    run = prepare(project)
    process = project.start(*RUN, *THREE, ENDLESS, "checkpoint.every_minutes=0.01", f"checkpoint.keep_last={2 * TIMES}", env=SLEEPS)

    def checkpoints() -> list[Path]:
        return sorted((run / "checkpoints").glob("step_*/COMPLETE"))

    wait_for(lambda: len(checkpoints()) >= TIMES, timeout_s=300)
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout=60)
    assert done.returncode == 75, done.output
    check_stopped(project, run)
    saved = [int(mark.parent.name.removeprefix("step_")) for mark in checkpoints()]
    print(f"  {len(saved)} saved by time, after steps {saved}")
    assert {f"save after step {step}" for step in saved[:-1]} <= last_steps(run)[0]
    check(project, run, command=THREE)
    whole = [record for record in numbers(run) if record["step"] % 20 == 0]  # the last step of a run is logged, too
    for step in random.Random().sample(saved, 2):  # from the middle, too
        folder = project.folder / f"from_{step}"
        shutil.copytree(run, folder)
        done = project.run("resume", f"{folder}/checkpoints/step_{step:08d}", f"trainer.max_steps={step + 60}", timeout=300)
        assert done.returncode == 0, done.output
        again = [record for record in numbers(folder) if record["step"] % 20 == 0 and record["step"] <= whole[-1]["step"]]
        assert again == [record for record in whole if record["step"] <= again[-1]["step"]]


def test_ranks_that_run_ahead_of_each_other_stop_for_a_machine_that_comes(project: Project, free_port: int) -> None:
    run = prepare(project)
    elastic = ["cluster=machines", "cluster.device=cpu", "cluster.processes_per_node=2", "cluster.nodes=1:2", "cluster.max_restarts=99"]
    batch = ["trainer.global_batch_size=64", "loader.micro_batch_size=32"]
    command = [*RUN, *elastic, *batch, "checkpoint.every_steps=50", ENDLESS, f"cluster.rendezvous_endpoint=127.0.0.1:{free_port}"]
    host = project.start(*command, "cluster.node_rank=0", env=SLEEPS)

    def train_on() -> None:
        seen = last_step(run)
        wait_for(lambda: last_step(run) > seen + 100, timeout_s=300)

    def num_stops() -> int:
        return (run / "logs/rank_00000.log").read_text().count("all ranks stop after step")

    train_on()
    said = ""  # by rank 0, which is on either machine
    for comes in range(1, TIMES + 1):
        guest = project.start(*command, "cluster.node_rank=1", env=SLEEPS)
        wait_for(lambda comes=comes: num_stops() == comes, timeout_s=300)
        train_on()
        if comes < TIMES:
            guest.kill()
            said += finish(guest).stdout
            train_on()
    host.send_signal(signal.SIGTERM)
    done = [finish(process, timeout=120) for process in (host, guest)]
    assert done[0].returncode == 75, done[0].output
    said += done[0].stdout + done[1].stdout
    assert said.count("the set of machines changed; 4 ranks continue from step") == TIMES, said
    of_ranks = last_steps(run)
    assert of_ranks[0] == of_ranks[1]
    check(project, run, command=["cluster=cpu", "cluster.processes_per_node=2", *batch], torchrun=["--standalone", "--nproc-per-node=2"])
