"""What is frozen keeps its values, and is trained from its step on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ddp_train.callbacks.freeze import Freeze
from ddp_train.errors import ConfigError
from ddp_train.training.train_state import TrainState
from tests.unit.callbacks.fake_run import FakeRun
from tests.unit.parts import components, trainer


def test_parameters_keep_their_values_until_their_step() -> None:
    chosen = "callbacks.freeze.patterns=['hidden.0.weight']"
    parts = components("callbacks=freeze", chosen, "callbacks.freeze.until_step=3", "trainer.max_steps=5", "optimizer.weight_decay=0.5")
    weight, steps = parts.model.get_parameter("hidden.0.weight"), list[torch.Tensor]()
    parts = replace(parts, callbacks={"before": Noting(weight, steps), **parts.callbacks})
    others = parts.model.get_parameter("hidden.0.bias").clone()
    assert trainer(parts).train()
    assert [torch.equal(steps[0], each) for each in steps] == [True, True, True, False, False]
    assert not torch.equal(others, parts.model.get_parameter("hidden.0.bias"))


class Noting:
    def __init__(self, weight: torch.Tensor, steps: list[torch.Tensor]) -> None:
        self.weight, self.steps = weight, steps

    def on_step(self, run: object) -> None:
        self.steps.append(self.weight.detach().clone())


def test_a_run_that_goes_on_is_where_it_was() -> None:
    freeze = Freeze(["0"], until_step=5)
    for step, is_trained in ((0, False), (4, False), (5, True), (9, True)):
        run = FakeRun(step=step)
        freeze.on_start(run)
        assert run.trained == [(["0.bias", "0.weight"], is_trained)]
    parts = components("callbacks=freeze", "callbacks.freeze.patterns=[head]", "callbacks.freeze.until_step=2", "trainer.max_steps=4")
    assert trainer(parts, TrainState(step=3, position=96)).train()
    assert all(parameter.requires_grad for parameter in parts.model.parameters())


def test_parameters_are_trained_until_they_are_frozen_from_a_step_on() -> None:
    chosen = ["callbacks.freeze.patterns=['hidden.0.weight']", "callbacks.freeze.from_step=2", "callbacks.freeze.until_step=4"]
    parts = components("callbacks=freeze", *chosen, "trainer.max_steps=6", "optimizer.weight_decay=0.5")
    weight, steps = parts.model.get_parameter("hidden.0.weight"), list[torch.Tensor]()
    parts = replace(parts, callbacks={"before": Noting(weight, steps), **parts.callbacks})
    assert trainer(parts).train()
    assert [torch.equal(one, other) for one, other in pairwise(steps)] == [False, True, True, False, False]
    freeze = Freeze(["0"], from_step=5)
    for step, is_trained in ((0, True), (4, True), (5, False), (9, False)):
        run = FakeRun(step=step)
        freeze.on_start(run)
        assert run.trained == [(["0.bias", "0.weight"], is_trained)]


def test_what_cannot_be_is_refused() -> None:
    mine = "+callbacks.mine={_target_: ddp_train.callbacks.freeze.Freeze, patterns: [nothing]}"
    with pytest.raises(ConfigError, match=r"callbacks\.mine\.from_step: is 5\n *expected: less than until_step=5"):
        components(mine, "+callbacks.mine.from_step=5", "+callbacks.mine.until_step=5")
    with pytest.raises(ConfigError, match=r"callbacks\.mine\.patterns: 'nothing' matches no parameter"):
        trainer(components(mine, "trainer.max_steps=1")).train()
    with pytest.raises(ConfigError, match="a list of names"):
        Freeze("head")
    parts = components("trainer.max_steps=1")
    parts = replace(parts, callbacks={"unfreeze": Unfreeze()})
    parts.model.register_parameter("late", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="the optimizer does not have"):
        trainer(parts).train()


class Unfreeze:
    def on_start(self, run: FakeRun) -> None:
        run.set_trained(["late"], True)
