"""The rates that are logged."""

from __future__ import annotations

from ddp_train.callbacks.device import Device
from ddp_train.callbacks.learning_rate import LearningRate
from tests.unit.callbacks.fake_run import FakeRun


def test_rates_and_memory_are_logged_at_log_steps_alone() -> None:
    run = FakeRun()
    for callback in (LearningRate(), Device()):
        callback.step(run)
    assert run.logged["lr/all"] == 0.5
    assert 0.01 < run.logged["device/host_gib"] < 1000
    quiet = FakeRun(is_log_step=False)
    for callback in (LearningRate(), Device()):
        callback.step(quiet)
    assert quiet.logged == {}
