"""A GAN of the user's, with a metric of all predictions: the same on any number of processes, killed and resumed, and in a sweep."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FEW, Project, finish, metrics, wait_for

pytestmark = pytest.mark.distributed

GAN = """
import ddp_train
import torch
import torch.nn.functional as F
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 768))
        self.discriminator = nn.Sequential(nn.Linear(768, 32), nn.LeakyReLU(0.2), nn.Dropout(0.0), nn.Linear(32, 1))

class Adversarial(ddp_train.TurnObjective):
    goals = {"gap": "min"}
    turns = {"discriminator": ["discriminator"], "generator": ["generator"]}
    def noise(self, real):
        return torch.randn(len(real), 16)
    def turn_loss(self, model, batch, turn):
        real = batch[0].flatten(1)
        fake = model.generator(self.noise(real))
        if turn == "generator":
            return F.softplus(-model.discriminator(fake)).flatten()
        return (F.softplus(-model.discriminator(real)) + F.softplus(model.discriminator(fake.detach()))).flatten()
    def evaluate(self, model, batch):
        real = model.discriminator(batch[0].flatten(1)).flatten()
        return ddp_train.Evaluated({"gap": real}, compared=(real, batch[1]))

class Exact(Adversarial):  # no noise, and no batch norm: the same for any split
    def noise(self, real):
        return real[:, :16]

class Plain(Pair):
    def __init__(self):
        super().__init__()
        del self.generator[1]

def median(predictions, targets):
    return float(predictions.median())

median.higher_is_better = False
"""
RARELY = """
class Rarely(Adversarial):
    def turns_at(self, step):
        return ["discriminator", "generator"] if step % 3 == 2 else ["discriminator"]
"""
ADAM = "{_target_: torch.optim.Adam, _partial_: true, lr: 2e-3}"
SGD = "{_target_: torch.optim.SGD, _partial_: true, lr: 0.05, momentum: 0.9}"
TURNS = ("discriminator", "generator")
COMMON = [
    *FEW,
    *(
        "~model.width",
        "~model.dropout",
        "~model.image_shape",
        "~model.num_classes",
        "~objective.label_smoothing",
        "cluster=cpu",
        "trainer.max_epochs=null",
        "trainer.clip_grad_norm=1.0",
    ),
    *("+evaluation.metrics.median._target_=gan.median", "+evaluation.metrics.median._partial_=true", "checkpoint.metric=eval/median"),
]


def values(run: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record.get(name) for name in ("split", "step", "loss", *names)) for record in metrics(run)]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_a_gan_is_the_same_on_any_number_of_processes(project: Project, ranks: int) -> None:
    project.write("gan.py", GAN)
    command = [*COMMON, "model._target_=gan.Plain", "objective._target_=gan.Exact", "trainer.max_steps=10", "evaluation.every_steps=5"]
    command += ["trainer.global_batch_size=32", "loader.micro_batch_size=8", "health.check_replicas_every_steps=4"]
    for world_size in (1, ranks):
        done = project.run(*command, f"cluster.processes_per_node={world_size}", f"hydra.run.dir=outputs/{world_size}", timeout=300)
        assert done.returncode == 0, done.output
    for mine, theirs in zip(metrics(project.folder / "outputs/1"), metrics(project.folder / f"outputs/{ranks}"), strict=True):
        names = ("gap", "median") if mine["split"] == "eval" else ("loss", "grad_norm", *(f"loss_{turn}" for turn in TURNS))
        for name in names:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4), (name, mine["step"])


@pytest.mark.long
def test_a_gan_that_is_killed_and_resumed_is_bitwise_the_one_that_never_stopped(project: Project) -> None:
    """With noise, batch norm, two optimizers; the generator trains every third step, for the first time after the first checkpoint."""
    project.write("gan.py", GAN + RARELY)
    command = [*COMMON, "model._target_=gan.Pair", "objective._target_=gan.Rarely", "cluster.processes_per_node=3", "trainer.max_steps=30"]
    command += ["checkpoint.every_steps=2", "evaluation.every_steps=10", "trainer.log_every_steps=5"]
    command += ["optimizer=several", f"optimizer.parts={{generator: {ADAM}, discriminator: {SGD}}}"]
    whole = project.run(*command, "hydra.run.dir=outputs/whole", timeout=300)
    assert whole.returncode == 0, whole.output
    stopped = project.folder / "outputs" / "stopped"
    process = project.start(*command, "hydra.run.dir=outputs/stopped")
    wait_for(lambda: len(list((stopped / "checkpoints").glob("step_*/COMPLETE"))) >= 2, timeout_s=300)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert not (stopped / "result.json").exists()
    resumed = project.run(*command, "hydra.run.dir=outputs/stopped", timeout=300)
    assert resumed.returncode == 0, resumed.output
    assert "resumed  after step" in resumed.stdout
    names = ("gap", "median", *(f"loss_{turn}" for turn in TURNS))
    assert values(stopped, *names) == values(project.folder / "outputs/whole", *names)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [["strategy=ddp"], ["strategy=local_sgd", "strategy.every_steps=5", "strategy.outer_momentum=0.5"]])
def test_a_gan_that_is_stopped_and_resumed_is_bitwise_the_one_that_never_stopped(project: Project, strategy: list[str]) -> None:
    """Stopped within a step that takes the discriminator alone, between two records, and again in one that takes both.

    Each time between two synchronisations, where there are some.
    """
    project.write("gan.py", GAN + RARELY)
    command = [*COMMON, "model._target_=gan.Pair", "objective._target_=gan.Rarely", "cluster.processes_per_node=3", "trainer.max_steps=14"]
    command += ["checkpoint.every_steps=100", "evaluation.every_steps=7", "trainer.log_every_steps=5", "callbacks=ema", *strategy]
    command += ["optimizer=several", f"optimizer.parts={{generator: {ADAM}, discriminator: {SGD}}}"]
    whole = project.run(*command, "hydra.run.dir=outputs/whole", timeout=400)
    assert whole.returncode == 0, whole.output
    parts = project.folder / "outputs" / "parts"
    first = project.run(*command, "hydra.run.dir=outputs/parts", "debug.faults=[{kind: sigterm, rank: 1, step: 3}]", timeout=400)
    second = project.run("resume", str(parts), "debug.faults=[{kind: sigterm, rank: 2, step: 8}]", timeout=400)
    resumed = project.run("resume", str(parts), "debug.faults=[]", timeout=400)
    assert [done.returncode for done in (first, second, resumed)] == [75, 75, 0], first.output + second.output + resumed.output
    names = ("gap", "median", *(f"loss_{turn}" for turn in TURNS))
    assert values(parts, *names) == values(project.folder / "outputs/whole", *names)


@pytest.mark.long
def test_a_sweep_trains_gans_one_after_the_other(project: Project) -> None:
    project.write("gan.py", GAN)
    command = [
        *COMMON,
        "model._target_=gan.Pair",
        "objective._target_=gan.Adversarial",
        "cluster.processes_per_node=2",
        "trainer.max_steps=5",
    ]
    done = project.run("-m", *command, "seed=0,1,0", "sweep.metric=eval/median", timeout=600)
    assert done.returncode == 0, done.output
    first, second, third = project.runs()
    assert values(first, "median") == values(third, "median") != values(second, "median")
