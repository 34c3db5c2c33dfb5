"""An objective of the user's own may use the model in any way: on two ranks it is the run of one."""

from __future__ import annotations

import pytest

from tests.conftest import FEW, Project, metrics

pytestmark = pytest.mark.distributed

OWN = """
import torch
from torch import nn


class Coder(nn.Module):
    def __init__(self, steps=3, seed=0):
        super().__init__()
        self.steps = steps
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([nn.Linear(768, 768), nn.Linear(768, 768)])

    def encode(self, images):
        return torch.tanh(self.blocks[0](images.flatten(1))) * self.scale

    def decode(self, codes):
        return self.blocks[1](codes)

    def forward(self, images):
        return self.decode(self.encode(images))


class Reconstruction:
    goals = {"error": "min"}

    def weight(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        images = batch[0]
        codes = model.encode(images)  # a method, an attribute, and the forward twice
        twice = model(model(images).view_as(images))
        return sum(((each - images.flatten(1)) ** 2).mean(1).sum() for each in (model.decode(codes), twice)) / model.steps

    def score(self, model, batch):
        errors = (model.decode(model.encode(batch[0])) - batch[0].flatten(1)) ** 2
        return {"error": errors.mean(1).sum(), "count": torch.tensor(len(batch[1]))}

    def metrics(self, totals):
        return {"error": totals["error"] / totals["count"]}
"""
USE = ["model=custom", "model._target_=own.Coder", "objective=custom", "objective._target_=own.Reconstruction", "trainer.max_steps=4"]


def numbers(project: Project, name: str, *words: str) -> list[float]:
    """Train, and return the loss and the gradient's norm of each step, and what the evaluation found."""
    run = f"hydra.run.dir=outputs/{name}"
    done = project.run(*FEW, *USE, "trainer.global_batch_size=32", "cluster=cpu", run, *words)
    assert done.returncode == 0, done.output
    records = metrics(project.folder / "outputs" / name)
    return [record[key] for record in records for key in ("loss", "grad_norm", "error") if key in record]


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero1", "ddp compile=default", "power_sgd"))]
)
def test_methods_attributes_and_several_forwards_of_the_model_are_those_of_one_process(project: Project, strategy: str) -> None:
    project.write("own.py", OWN)
    alone = numbers(project, "alone", "cluster.processes_per_node=1")
    together = numbers(project, "together", "cluster.processes_per_node=2", *f"strategy={strategy}".split())
    assert together == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 4 * 2 + 1


@pytest.mark.long
def test_a_method_of_the_model_is_refused_in_words_under_fsdp(project: Project) -> None:
    project.write("own.py", OWN)
    done = project.run(*FEW, *USE, "cluster=cpu", "strategy=fsdp")
    assert done.returncode == 2
    assert "in encode" in done.stderr and "fix: strategy=ddp or zero1; under fsdp the weights are whole" in done.stderr
