"""`ddp-train plan` as a process: quick, and without a trace."""

from __future__ import annotations

import resource
import shutil
import time

import pytest

from tests.conftest import Project
from tests.unit.cli.test_plan import SLURM, fact, tree

pytestmark = pytest.mark.distributed

_CPU_S = 6.0  # twice what two slow cores take: wall time says little where other tests run
_MACHINES = [*SLURM, "experiment=mnist_convnet", "model.width=64", "trainer.max_steps=1000", "after=done", "init_from=done"]


def test_sixteen_machines_are_planned_in_seconds_and_nothing_is_written(project: Project) -> None:
    assert shutil.which("sbatch", path="/nowhere") is None
    assert project.run("model=mlp", "cluster.processes_per_node=1", "trainer.max_steps=2", "hydra.run.dir=done").returncode == 0
    project.write("mine.py", "from torch import nn\n\n\nclass Mine(nn.Linear):\n    pass\n")
    before, started = tree(project.folder), time.monotonic()
    used_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = project.run("plan", *_MACHINES, env={"PATH": "/nowhere"})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.output
    assert tree(project.folder) == before
    assert fact(ended.stdout, "ranks") == ["128 on cuda: 16 machines x 8"]
    assert fact(ended.stdout, "after") == ["done   (done)"]
    assert "lacks train-images" in ended.stdout  # and they were not fetched
    cpu_s = used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime
    assert cpu_s < _CPU_S, f"{cpu_s:.1f} s of the processor, {time.monotonic() - started:.1f} s"


def test_a_mistake_ends_it_as_it_would_end_the_run(project: Project) -> None:
    planned, run = project.run("plan", "model=resnet", "seed=abc"), project.run("model=resnet", "seed=abc")
    assert planned.returncode == run.returncode == 2
    assert planned.stderr == run.stderr
    assert list(project.folder.iterdir()) == []
