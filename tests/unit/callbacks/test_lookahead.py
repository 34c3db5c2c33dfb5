"""Slow weights are what the formula says, training goes on from them, and a run that was stopped has them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.callbacks.lookahead import Lookahead
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError
from ddp_train.training.saved_state import load
from ddp_train.training.state import TrainState
from tests.unit.callbacks.fake_run import FakeRun
from tests.unit.parts import components, saved, trainer

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var"]


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.25)
    model(torch.randn(8, 3))  # batch norm's averages


def now(run: FakeRun) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items() if name in NAMES}


def test_it_follows_every_few_steps_and_training_goes_on_from_there() -> None:
    run, lookahead = FakeRun(total_steps=13), Lookahead(0.9, decay_power=2.0, every_steps=3, start_step=3, return_every_steps=5)
    lookahead.start(run)
    slow: dict[str, Tensor] = {}
    for run.step in range(1, 14):
        change(run.model)
        expected = now(run)
        if run.step in (6, 9, 12):
            keeps = 0.9**3 * (run.step / 13) ** 2
            slow = {name: keeps * slow[name] + (1 - keeps) * each for name, each in expected.items()} if slow else expected
        if run.step in (9, 10, 12, 13):  # it has followed, a period is over (5 was before the first time), or it is the last step
            expected = slow
        lookahead.step(run)
        for name, each in now(run).items():
            torch.testing.assert_close(each, expected[name], msg=f"{name} after step {run.step}")


def test_half_precision_is_averaged_in_float32() -> None:
    run, lookahead = FakeRun(model=nn.Linear(3, 2).bfloat16()), Lookahead(every_steps=1)
    lookahead.start(run)
    for run.step in (1, 2):
        lookahead.step(run)
    assert {each.dtype for each in lookahead.state_dict()["slow"].values()} == {torch.float32}
    assert {each.dtype for each in run.model.parameters()} == {torch.bfloat16}


def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    few = ["callbacks=lookahead", "callbacks.lookahead.every_steps=2", "callbacks.lookahead.start_step=1", "trainer.max_steps=6"]
    whole = components(*few)
    trainer(whole).train()
    stopped = components(*few)
    stopped_at = TrainState()
    trainer(stopped, stopped_at, stops_after=lambda step: step == 3).train()
    checkpoint = saved(tmp_path, 3, stopped)
    again, state = components(*few), TrainState(step=3, samples=stopped_at.samples)
    load(checkpoint, again, state, alone())
    trainer(again, TrainState(step=3, samples=stopped_at.samples)).train()
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in whole.model.state_dict().items())
    without = components(*few, "~callbacks.lookahead")
    trainer(without).train()
    assert not all(torch.equal(value, without.model.state_dict()[name]) for name, value in whole.model.state_dict().items())


@pytest.mark.parametrize(
    "wrong", [{"decay": 1.0}, {"decay_power": -1.0}, {"every_steps": 0}, {"start_step": -1}, {"return_every_steps": 0}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"callbacks.lookahead.{next(iter(wrong))}"):
        Lookahead(**wrong)


def test_of_another_model_they_are_refused() -> None:
    lookahead = Lookahead()
    lookahead.load_state_dict({"slow": {"other": torch.zeros(1)}})
    with pytest.raises(ValueError, match="another model"):
        lookahead.start(FakeRun())
