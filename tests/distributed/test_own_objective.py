"""An objective of the user's own may use the model in any way: on two ranks it is the run of one."""

from __future__ import annotations

import pytest

from tests.conftest import FEW, Project, metrics

pytestmark = pytest.mark.distributed

OWN = """
import ddp_train
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


class Reconstruction(ddp_train.Objective):
    goals = {"error": "min"}

    def loss(self, model, batch):
        images = batch[0]
        codes = model.encode(images)  # a method, an attribute, and the forward twice
        twice = model(model(images).view_as(images))
        return sum(((each - images.flatten(1)) ** 2).mean(1) for each in (model.decode(codes), twice)) / model.steps

    def evaluate(self, model, batch):
        return {"error": ((model.decode(model.encode(batch[0])) - batch[0].flatten(1)) ** 2).mean(1)}
"""
AGREE = (
    OWN
    + """

class Agree(ddp_train.BatchLoss):
    goals = {"error": "min"}
    gathers = True

    def loss(self, model, batch):
        embeddings = model.encode(batch[0]), model(batch[0].flip(3))
        left, right = (self.gather(nn.functional.normalize(rows, dim=1)) for rows in embeddings)
        return nn.functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))

    def evaluate(self, model, batch):
        return {"error": (model(batch[0]) - batch[0].flatten(1)).square().mean(1)}
"""
)
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


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_samples_are_compared_with_those_of_all_ranks(project: Project, ranks: int) -> None:
    project.write("own.py", AGREE)
    use = ["objective._target_=own.Agree", "strategy=ddp"]
    alone = numbers(project, "alone", *use, "cluster.processes_per_node=1", "loader.micro_batch_size=32")
    together = numbers(project, "together", *use, f"cluster.processes_per_node={ranks}", f"loader.micro_batch_size={32 // ranks}")
    assert together == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 4 * 2 + 1


@pytest.mark.long
def test_a_method_of_the_model_is_refused_in_words_under_fsdp(project: Project) -> None:
    project.write("own.py", OWN)
    done = project.run(*FEW, *USE, "cluster=cpu", "strategy=fsdp")
    assert done.returncode == 2
    assert "in encode" in done.stderr and "fix: strategy=ddp or zero1; under fsdp the weights are whole" in done.stderr


JAGGED = """
import torch
from torch import nn


class Clouds(torch.utils.data.Dataset):
    def __init__(self, num_samples=64, seed=0):
        self.sizes = [3 + 7 * i % 11 for i in range(num_samples)]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        points = torch.randn(self.sizes[i], 3, generator=torch.Generator().manual_seed(i))
        return points, points.mean(0).sum()


def jagged(samples):
    points, targets = zip(*samples)
    starts = torch.tensor([0, *map(len, points)][:-1]).cumsum(0)
    return (torch.cat(points), starts), torch.stack(targets)


def packed(samples):
    points, targets = zip(*samples)
    return nn.utils.rnn.pack_sequence(points, enforce_sorted=False), torch.stack(targets)


def dropping(samples):
    from ddp_train.interfaces import Counted
    kept = [sample for sample in samples if len(sample[0]) != 5]
    return Counted(jagged(kept), len(kept))


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, batch):
        if isinstance(batch, nn.utils.rnn.PackedSequence):
            padded, sizes = nn.utils.rnn.pad_packed_sequence(batch, batch_first=True)
            return self.head(padded.sum(1) / sizes[:, None]).squeeze(1)
        points, starts = batch
        ends = torch.cat([starts[1:], torch.tensor([len(points)])])
        return torch.cat([self.head(points[a:b].mean(0)) for a, b in zip(starts, ends)])
"""


@pytest.mark.parametrize(
    "collate", ["jagged", pytest.param("packed", marks=pytest.mark.long), pytest.param("dropping", marks=pytest.mark.long)]
)
def test_a_bare_loss_over_batches_whose_rows_are_not_samples_is_the_mean_over_samples(project: Project, collate: str) -> None:
    project.write("own.py", JAGGED)
    use = ["model=custom", "model._target_=own.Mean", "data=custom", "data._target_=own.Clouds", "+data.eval.num_samples=13"]
    use += ["objective=custom", "objective._target_=torch.nn.MSELoss", f"+loader.collate._target_=own.{collate}", "~metrics.tensorboard"]
    use += [
        "+loader.collate._partial_=true",
        "trainer.max_steps=3",
        "trainer.global_batch_size=16",
        "trainer.log_every_steps=1",
        "cluster=cpu",
    ]

    def numbers(name: str, *words: str) -> list[float]:
        done = project.run(*use, f"hydra.run.dir=outputs/{name}", *words)
        assert done.returncode == 0, done.output
        records = metrics(project.folder / "outputs" / name)
        return [record[key] for record in records for key in ("loss", "grad_norm") if key in record]

    alone = numbers("alone", "cluster.processes_per_node=1", "loader.micro_batch_size=16", "evaluation.batch_size=13")
    split = numbers("split", "cluster.processes_per_node=2", "loader.micro_batch_size=3", "evaluation.batch_size=4")
    assert split == pytest.approx(alone, rel=1e-5)
    assert 0.1 < alone[0] < 3  # of a model that knows nothing; with rows for samples it was 20 times that
