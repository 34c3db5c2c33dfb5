"""Samples of unequal weight on ranks of unequal share: gradients, skipped steps and predictions do not depend on the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.loader.order import SampleOrder, share
from ddp_train.loader.sampler import Shuffled
from tests.conftest import Project, metrics

pytestmark = pytest.mark.distributed

NUM_SAMPLES, GLOBAL_BATCH, STEPS = 37, 10, 8  # 37 = 3 x 10 + 7, of which three ranks take 3, 2 and 2
PARTS = """
import os
import torch
from ddp_train import amp

amp._INIT_SCALE = 2.0**20  # high, so that the first steps overflow

def counts(sample):
    return sample % 7 if sample % 3 == 0 else 0

class Ragged:
    facts = {"vocab_size": 11, "context_length": 6}
    def __init__(self, num_samples):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(11, (num_samples, 6), generator=generator)
        self.targets = torch.randint(11, (num_samples, 6), generator=generator)
        for sample in range(num_samples):
            self.targets[sample, counts(sample):] = -100
    def __len__(self):
        return len(self.tokens)
    def batch(self, indices):
        return self.tokens[indices], self.targets[indices]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)
    def forward(self, tokens):
        return self.head(self.embedding(tokens))

class Noting(torch.optim.SGD):
    def step(self, closure=None):
        path = f"gradients_{os.environ['WORLD_SIZE']}_{os.environ['RANK']}.pt"
        found = torch.load(path) if os.path.exists(path) else []
        gradients = [parameter.grad.flatten().clone() for group in self.param_groups for parameter in group["params"]]
        torch.save([*found, torch.cat(gradients)], path)
        super().step(closure)

class Half(amp.Amp):
    def __init__(self, dtype):
        super().__init__("float16")  # which the config check refuses on a CPU
"""


def run(project: Project, world_size: int, *overrides: str) -> Path:
    project.write("parts.py", PARTS)
    without = [f"~data.{name}" for name in ("split", "image_size", "channels", "num_classes", "noise", "seed", "num_samples", "eval")]
    without += [f"~model.{name}" for name in ("image_shape", "num_classes", "width", "depth")]
    done = project.run(
        *["model=mlp", *without, "model._target_=parts.Model", "data._target_=parts.Ragged", f"+data.num_samples={NUM_SAMPLES}"],
        *["+data.eval={num_samples: 23}", "loader.micro_batch_size=2", "evaluation.batch_size=3", "objective=language_modeling"],
        *["objective.ignore_index=-100", "optimizer=sgd", "optimizer._target_=parts.Noting", "scheduler=constant", "~metrics.tensorboard"],
        *["trainer.log_every_steps=1", f"trainer.max_steps={STEPS}", f"trainer.global_batch_size={GLOBAL_BATCH}"],
        *["evaluation.save_predictions=true", "cluster=cpu", f"cluster.processes_per_node={world_size}"],
        *[f"hydra.run.dir=outputs/{world_size}", *overrides],
    )
    assert done.returncode == 0, done.output
    return project.folder / "outputs" / str(world_size)


def gradients(project: Project, world_size: int) -> list[Any]:
    """Return the gradient of every step that was taken, after checking that all ranks took the same steps with the same ones."""
    first, *others = (torch.load(project.folder / f"gradients_{world_size}_{rank}.pt") for rank in range(world_size))
    for other in others:
        assert len(other) == len(first)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
    return first


@pytest.mark.long
def test_masked_tokens_on_three_ranks_give_the_gradients_and_predictions_of_one(project: Project) -> None:
    order = SampleOrder(Shuffled(NUM_SAMPLES, seed=0), global_batch_size=GLOBAL_BATCH, drop_last=False)
    shares = [order.indices(0, *share(0, GLOBAL_BATCH, rank, 3)) for rank in range(3)]
    assert 0 in [sum(sample % 7 for sample in each.tolist() if sample % 3 == 0) for each in shares]  # a rank in which nothing counts

    alone, three = (run(project, world_size, "deterministic=true") for world_size in (1, 3))
    expected, found = gradients(project, 1), gradients(project, 3)
    assert len(expected) == len(found) == STEPS
    for mine, theirs in zip(expected, found, strict=True):
        assert torch.linalg.vector_norm(mine - theirs) <= 1e-6 * torch.linalg.vector_norm(mine)
    for step in (4, 8):  # the end of each epoch
        folder = f"predictions/step_{step:08d}"
        assert sorted(path.name for path in (three / folder).iterdir()) == ["loss.npy", "tokens.npy"]
        assert np.load(three / folder / "tokens.npy").tolist() == [sample % 7 if sample % 3 == 0 else 0 for sample in range(23)]
        assert np.allclose(np.load(three / folder / "loss.npy"), np.load(alone / folder / "loss.npy"), rtol=1e-5)
    assert sorted(path.name for path in (three / "predictions").iterdir()) == ["step_00000004", "step_00000008"]


@pytest.mark.long
def test_in_half_precision_all_ranks_skip_the_same_steps(project: Project) -> None:
    """The gradients that the ranks have after the all-reduce are the same, infinities included, so no rank decides otherwise."""
    alone, three = (run(project, world_size, "amp=off", "amp._target_=parts.Half") for world_size in (1, 3))
    expected, found = gradients(project, 1), gradients(project, 3)
    assert 0 < len(expected) < STEPS
    assert len(found) == len(expected)
    for mine, theirs in zip(expected, found, strict=True):
        assert torch.linalg.vector_norm(mine - theirs) <= 2e-3 * torch.linalg.vector_norm(mine)
    for mine_, theirs_ in zip(metrics(alone, "train"), metrics(three, "train"), strict=True):
        assert theirs_["loss"] == pytest.approx(mine_["loss"], rel=1e-3)
        assert (theirs_["grad_norm"] is None) == (mine_["grad_norm"] is None)
