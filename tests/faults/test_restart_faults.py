"""kill -9 of a random rank at twenty random moments: every run finishes, and is bitwise the one that nothing happened to."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Project, finish, metrics
from tests.distributed.test_failure import children, pid_of
from tests.distributed.test_restart import numbers

pytestmark = [pytest.mark.distributed, pytest.mark.long]

SLOW = """
import hashlib, os, time
from pathlib import Path
from ddp_train.interfaces.strategy import local_rows
from ddp_train.model.mlp import MLP

class Slow(MLP):
    def forward(self, images):
        if self.training:
            time.sleep(0.05)  # so that a moment in a step, and not only in a save, can be hit
        else:  # the last time with the final weights, whatever a checkpoint looks like
            weights = b"".join(local_rows(value).clone().numpy().tobytes() for value in self.parameters())
            Path(f"weights_{os.environ['RANK']}").write_text(hashlib.sha256(weights).hexdigest())
        return super().forward(images)
"""
KILLS, INSIDE_A_SAVE = 20, 8
RUN = ["model=mlp", "model._target_=slow.Slow", "model.width=900", "model.depth=3", "data.num_samples=1600", "data.eval.num_samples=101"]
RUN += ["trainer.max_steps=100", "trainer.max_epochs=null", "trainer.log_every_steps=1", "checkpoint.every_steps=3", "~metrics.tensorboard"]
RUN += ["loader.micro_batch_size=8", "cluster=cpu", "hydra.run.dir=run"]


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".partial_*"))


def last_time(run: Path) -> float:
    """Return when the newest step was logged, in seconds since the epoch."""
    try:
        return max((record["time"] for record in metrics(run, "train")), default=0.0)
    except (OSError, ValueError):  # not there yet, or half a line
        return 0.0


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 3), ("ddp", 4), ("zero1", 3), ("fsdp", 4)], indirect=["strategy"])
def test_a_rank_that_is_killed_at_a_random_moment_changes_nothing(project: Project, strategy: str, world_size: int) -> None:
    kills, inside = KILLS // 2, INSIDE_A_SAVE // 2
    seed = random.randrange(10**6)
    print(f"\nseed {seed}, {strategy}, {world_size} ranks")
    draw = random.Random(seed)
    project.write("slow.py", SLOW)
    command = [*RUN, f"cluster.processes_per_node={world_size}", f"strategy={strategy}"]
    (project.folder / "undisturbed").mkdir()
    project.write("undisturbed/slow.py", SLOW)
    whole = Project(project.folder / "undisturbed")
    done = whole.run(*command)
    assert done.returncode == 0, done.output

    run, recoveries, in_saves = project.folder / "run", [], 0
    process = project.start(*command, f"cluster.max_restarts={kills}")
    for number in range(kills):
        wants_save = number < inside
        _wait_for_steps(process, run, draw.randint(4, 6))  # past a checkpoint: what never gets further is not started again
        if wants_save:
            _wait_for_save(process, run)
        else:
            time.sleep(draw.uniform(0, 0.3))
        rank = draw.randrange(world_size)
        in_saves += is_saving(run)
        killed, before = time.time(), last_time(run)
        os.kill(pid_of(rank, children(process.pid)[0]), signal.SIGKILL)
        while (now := last_time(run)) <= max(killed + 0.2, before):
            assert process.poll() is None, finish(process).output
            assert time.time() < killed + 120
            time.sleep(0.05)
        recoveries.append(now - killed)
        print(f"  rank {rank}{' in a save' if wants_save else ''}: next step after {recoveries[-1]:.1f} s, load {os.getloadavg()[0]:.1f}")
    done = finish(process, timeout=300)
    load = os.getloadavg()[2]
    print(f"  median {statistics.median(recoveries):.1f} s, longest {max(recoveries):.1f} s; {in_saves} of {kills} in a save")
    assert done.returncode == 0, done.output
    assert statistics.median(recoveries) < 8 * max(1.0, load / len(os.sched_getaffinity(0)))  # others may be at work here, too
    assert in_saves >= inside
    assert numbers(run) == numbers(whole.folder / "run")
    weights, expected = ({path.name: path.read_text() for path in folder.glob("weights_*")} for folder in (project.folder, whole.folder))
    assert weights == expected and len(weights) == world_size
    assert len(set(weights.values())) == (world_size if strategy == "fsdp" else 1)  # of rows of its own, or of all


def _wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Wait until so many steps have been taken since now, few enough that the run is not over."""
    seen, since = set(), last_time(run)
    while len(seen) < steps:
        assert process.poll() is None, finish(process).output
        if (now := last_time(run)) > since:
            seen.add(now)
        time.sleep(0.01)


def _wait_for_save(process: subprocess.Popen[str], run: Path) -> None:
    while not is_saving(run):
        assert process.poll() is None, finish(process).output
        time.sleep(0.001)
