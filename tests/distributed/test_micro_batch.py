"""`loader.micro_batch_size=auto` in whole runs: ranks with different memory have one number, and whoever goes on has it, too.

GPUs are pretended: a module of the user's, which each process imports by itself, says so and has so many samples fit on each rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import TINY, Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]

PRETENCE = """
import os, sys

if os.environ.get("PRETENDS"):
    from ddp_train.config import batch_sizes

    batch_sizes.resolve_device = lambda device: "cuda"
"""

MODEL = """
import os

import torch

from ddp_train.model.mlp import MLP
from ddp_train.training.check import micro_batch


class Fake:
    most = 0

    def total(self):
        return -(-10 * int(os.environ["ROOM"].split(",")[int(os.environ["RANK"])]) // 9)

    def in_use(self):
        return 0

    def begin(self):
        Fake.most = 0

    def peak(self):
        return Fake.most


class Limited(MLP):
    def forward(self, inputs):
        rank = int(os.environ["RANK"])
        Fake.most = max(Fake.most, len(inputs))
        if self.training and len(inputs) > int(os.environ["FITS"].split(",")[rank]):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs)


micro_batch.DeviceMemory = lambda device: Fake()
"""


def numbers(run: Path) -> list[tuple[object, ...]]:
    return [tuple(record.get(name) for name in ("split", "step", "loss", "grad_norm", "samples")) for record in metrics(run)]


@pytest.mark.parametrize(("strategy", "room"), [("ddp", "64,64"), ("fsdp", "64,11")])  # fsdp could not take an error back
def test_ranks_agree_and_a_killed_run_goes_on_with_the_number_that_it_found(project: Project, strategy: str, room: str) -> None:
    project.write("sitecustomize.py", PRETENCE)
    project.write("limited.py", MODEL)
    env = {"PYTHONPATH": str(project.folder), "PRETENDS": "yes", "FITS": "64,11", "ROOM": room}
    command = [*TINY, "cluster=cpu", "cluster.processes_per_node=2", "model._target_=limited.Limited", f"strategy={strategy}"]
    command += ["trainer.global_batch_size=64", "trainer.max_steps=6", "trainer.max_epochs=null", "checkpoint.every_steps=3"]
    auto = "loader.micro_batch_size=auto"
    whole = project.run(*command, "loader.micro_batch_size=11", "hydra.run.dir=outputs/given", env=env)
    assert whole.returncode == 0, whole.output
    fault = "debug.faults=[{kind: kill, rank: 1, step: 4}]"
    killed = project.run(*command, auto, fault, "hydra.run.dir=outputs/found", env=env)
    assert killed.returncode not in (0, 75), killed.output
    assert "a micro-batch of 11 is the largest that fits" in killed.output
    found = project.folder / "outputs" / "found"
    recorded = yaml.safe_load((found / "config.yaml").read_text())
    assert recorded["loader"]["micro_batch_size"] == 11
    assert "loader.micro_batch_size" in recorded["auto"]
    resumed = project.run("resume", str(found), "debug.faults=[]", env=env | {"FITS": "64,64"})  # nobody looks again
    assert resumed.returncode == 0, resumed.output
    assert "micro-batch 11 x 2 ranks x accumulation 3" in resumed.output
    assert "is the largest that fits" not in resumed.output
    assert numbers(found) == numbers(project.folder / "outputs" / "given")
