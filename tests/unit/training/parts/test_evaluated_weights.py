"""Optimizers with weights to train and others to evaluate: called around evaluation and saving, and resumed to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.checkpoint.read import read_shared
from ddp_train.checkpoint.save import Saver
from ddp_train.distributed.world import alone
from ddp_train.training.check.memory import estimate_checkpoint
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.evaluated_weights import evaluation_mode
from ddp_train.training.state import saved_state
from ddp_train.training.state.saved_state import KeptWeights, checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from ddp_train.traits import has_modes
from tests.unit.parts import components, trainer


class Averaging(torch.optim.Optimizer):
    """Schedule-free gradient descent: z takes the steps, x is their average, which is evaluated, and y between them is trained."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _move(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if is_training else 1 - 1 / group["beta"]
            for parameter in group["params"] if group["train_mode"] != is_training else []:
                if self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = is_training

    def train(self) -> None:
        self._move(is_training=True)

    def eval(self) -> None:
        self._move(is_training=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], 1 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                state["z"].sub_(parameter.grad, alpha=group["lr"])


OWN = [
    f"optimizer._target_={__name__}.Averaging",
    *(f"~optimizer.{name}" for name in ("betas", "eps", "weight_decay", "fused")),
    *("optimizer.lr=0.05", "scheduler=constant", "evaluation.every_steps=2"),
]


def save(folder: Path, parts: Components, state: TrainState) -> Path:
    """Save as a run does."""
    saver = Saver(folder=folder, world=alone(), config_hash="abc")
    with evaluation_mode(parts.optimizer) as trained:
        saver.save(checkpoint_content(parts, state, WindowSums(), alone(), KeptWeights(parameters=trained)))
    assert saver.finish() is None
    return folder / f"step_{state.step:08d}"


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(one.equal(other) for one, other in zip(ones, others, strict=True))


def test_evaluation_has_its_own_weights_and_training_goes_on_with_its_own_to_the_bit() -> None:
    parts = components(*OWN, "trainer.max_steps=3")
    trainer(parts).train()
    before = values(parts.model)
    with evaluation_mode(parts.optimizer) as trained:
        assert same(trained, before)
        assert not same(values(parts.model), before)
    assert same(values(parts.model), before)
    plain = components("trainer.max_steps=1")
    assert not has_modes(plain.optimizer)
    with evaluation_mode(plain.optimizer) as trained:
        assert trained == []


def test_a_run_that_was_saved_and_resumed_is_bitwise_one_that_was_not(tmp_path: Path) -> None:
    whole_records: list[Any] = []
    whole = components(*OWN, "trainer.max_steps=5")
    trainer(whole, evaluate_every_steps=2, write=whole_records.append).train()
    state, records = TrainState(), list[Any]()
    stopped = components(*OWN, "trainer.max_steps=3")
    trainer(stopped, state, evaluate_every_steps=2, write=records.append).train()
    path = save(tmp_path, stopped, state)
    resumed = components(*OWN, "trainer.max_steps=5")
    saved_state.start_from(path, resumed, state, alone())
    records = [record for record in records if (record["split"], record["step"]) != ("eval", 3)]  # the last step of the shorter run
    trainer(resumed, state, evaluate_every_steps=2, write=records.append).train()
    assert same(values(resumed.model), values(whole.model))
    assert [(record["step"], record["loss"]) for record in records] == [(record["step"], record["loss"]) for record in whole_records]


def test_a_checkpoint_has_the_weights_to_evaluate_as_the_model_s(tmp_path: Path) -> None:
    parts = components(*OWN, "trainer.max_steps=3")
    trainer(parts).train()
    path = save(tmp_path, parts, TrainState(step=3))
    with evaluation_mode(parts.optimizer):
        expected = values(parts.model)
    shared = read_shared(path)
    assert same(list(shared["model"].values()), expected)
    assert same(shared["parameters_in_training"], [each for group in parts.optimizer.param_groups for each in group["params"]])
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size <= estimate_checkpoint(parts, num_ranks=1) <= size + (1 << 17)


@pytest.mark.parametrize("last", [2, 3])
def test_the_evaluation_s_loss_is_that_of_the_averaged_weights(last: int) -> None:
    records: list[Any] = []
    parts = components(*OWN, f"trainer.max_steps={last}")
    trainer(parts, evaluate_every_steps=100, write=records.append).train()
    with evaluation_mode(parts.optimizer):
        again: list[Any] = []
        plain = trainer(parts, TrainState(step=last), write=again.append)
        parts.optimizer.eval()  # type: ignore[attr-defined]
        plain.evaluate()
    assert records[-1]["loss"] == again[-1]["loss"]
