"""An objective with weights of its own: trained, kept and saved as the model's are."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import Batch, Evaluated
from ddp_train.objective.classification import Classification
from ddp_train.training.check.memory import estimate_checkpoint
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState
from tests.conftest import FEW
from tests.unit.parts import components, saved, trainer


class Warm(nn.Module, Classification):
    """Cross entropy at a temperature that is learned, with centres that are pulled along and the number of batches seen."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        Classification.__init__(self)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.centres = nn.Parameter(torch.eye(num_classes))
        self.register_buffer("seen", torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.teacher = nn.BatchNorm1d(2).eval()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        logits = model(images) / self.log_temperature.exp()
        if self.training:
            self.seen += logits.detach().mean() * 0 + 1  # type: ignore[operator]
        return F.cross_entropy(logits, labels, reduction="none") + 0.01 * (logits - self.centres[labels]).square().sum(dim=1)

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        assert not self.drop.training
        return super().evaluate(model, batch)


class Hidden(Classification):
    """An objective in which nobody finds the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Linear(1, 1)


class Centred(nn.Module):
    """A loss function with a weight."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_classes))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.scale, targets)


def parts_of(kind: type, *overrides: str, optimizer: str = "adamw") -> Components:
    own = [f"objective._target_={kind.__module__}.{kind.__qualname__}", "~objective.label_smoothing", f"optimizer={optimizer}"]
    return components(*own, "scheduler=constant", "trainer.max_steps=9", *overrides, base=["model=mlp", "model.width=16", *FEW])


def step(parts: Components, *, on_nonfinite: str = "stop", spoil: bool = False, clip: float | None = None) -> Tensor | None:
    parts.trained_module.train()
    micro_batches = list(islice(parts.train_loader.micro_batches(0), parts.train_loader.grad_accum_steps))
    if spoil:
        micro_batches[0].batch[0].fill_(torch.nan)
    one_run = trainer(parts, clip_grad_norm=clip, on_nonfinite=on_nonfinite)
    return one_run.train_step(micro_batches, global_batch_size=32, measures_norm=True)


def values(parts: Components) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parts.trained_module.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_what_an_objective_learns_is_optimised_clipped_saved_and_resumed(tmp_path: Path, optimizer: str) -> None:
    parts = parts_of(Warm, optimizer=optimizer)
    before = values(parts)
    step(parts)
    after = values(parts)
    for name in ("objective.log_temperature", "objective.centres", "objective.seen", "model.head.weight"):
        assert not torch.equal(before[name], after[name]), name
    if optimizer == "muon":
        muon = {id(each) for group in parts.optimizer.param_groups if "ns_steps" in group for each in group["params"]}
        assert muon and id(parts.objective.centres) not in muon  # type: ignore[attr-defined]
    path = saved(tmp_path, 1, parts)
    assert estimate_checkpoint(parts, num_ranks=1) == pytest.approx(sum(each.stat().st_size for each in path.iterdir()), rel=0.5)
    other = parts_of(Warm, optimizer=optimizer)
    start_from(path, other, TrainState(), alone())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(values(other).values(), after.values(), strict=True))
    for each in (parts, other):
        torch.manual_seed(3)
        step(each, clip=1e-3)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(values(other).values(), values(parts).values(), strict=True))


def test_the_norm_that_is_clipped_counts_the_objectives_gradient() -> None:
    parts = parts_of(Warm)
    found: list[Tensor] = []
    parts.optimizer.step = lambda: found.extend(each.grad for each in parts.trained_module.parameters() if each.grad is not None)  # type: ignore[method-assign]
    norm = step(parts)
    assert norm is not None
    assert norm == pytest.approx(float(torch.cat([each.flatten() for each in found]).norm()))
    assert len(found) == len(list(parts.model.parameters())) + 2


def test_a_skipped_step_leaves_the_objective_as_it_was() -> None:
    parts = parts_of(Warm)
    step(parts, on_nonfinite="skip")
    before = values(parts)
    step(parts, on_nonfinite="skip", spoil=True)
    assert all(torch.equal(now, then) for now, then in zip(values(parts).values(), before.values(), strict=True))


def test_evaluation_puts_the_objectives_modes_back_each_as_it_was() -> None:
    parts = parts_of(Warm)
    parts.trained_module.train()
    assert evaluate(parts, alone())
    assert parts.objective.training and parts.objective.drop.training and not parts.objective.teacher.training  # type: ignore[attr-defined]


def test_a_loss_function_may_have_weights_too() -> None:
    parts = parts_of(Centred)
    step(parts)
    assert (parts.objective.loss_fn.scale != 1).all()  # type: ignore[attr-defined]


def test_of_an_objective_without_a_state_a_strategy_sees_the_model_alone() -> None:
    parts = components("objective._target_=torch.nn.CrossEntropyLoss", "objective.label_smoothing=0.1")
    assert parts.trained_module is parts.model
    assert [*parts.turns.plain.wrapped.children()] == [parts.model]


def test_parameters_that_nobody_would_find_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Hidden.temperature has parameters to train, but Hidden is not a torch.nn.Module"):
        parts_of(Hidden)


def test_a_checkpoint_of_another_objective_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, parts_of(Warm))
    with pytest.raises(UserError, match="of the objective: centres is in the checkpoint, and not in the model"):
        start_from(path, parts_of(Centred), TrainState(), alone())
    with pytest.raises(UserError, match="of the objective: log_temperature is in the checkpoint"):
        start_from(path, components("optimizer=adamw", "trainer.max_steps=9"), TrainState(), alone())
