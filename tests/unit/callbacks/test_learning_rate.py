"""The rates that are logged."""

from __future__ import annotations

from ddp_train.callbacks.learning_rate import LearningRate
from tests.unit.callbacks.fake_run import FakeRun


def test_rates_are_logged_at_log_steps_alone() -> None:
    run = FakeRun()
    LearningRate().on_step(run)
    assert run.logged["lr/all"] == 0.5
    quiet = FakeRun(is_log_step=False)
    LearningRate().on_step(quiet)
    assert quiet.logged == {}
