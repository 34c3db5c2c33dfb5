"""When a run is stopped early, and what is refused."""

from __future__ import annotations

import math

import pytest

from ddp_train.callbacks.early_stopping import EarlyStopping
from ddp_train.errors import ConfigError
from tests.unit.callbacks.fake_run import FakeRun


def stopped_after(values: list[float], early: EarlyStopping, name: str = "accuracy") -> tuple[int | None, str]:
    """Return after which evaluation the run is stopped, and why."""
    run = FakeRun()
    early.on_start(run)
    for number, value in enumerate(values, 1):
        run.step = 10 * number
        early.on_evaluation(run, {name: value})
        if run.stopped:
            return number, run.stopped
    return None, ""


@pytest.mark.parametrize(
    ("values", "after"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.3], None),  # the third brings it back
        ([0.1, 0.2, 0.2, 0.1, 0.2], 5),
        ([math.nan, 0.2, math.inf, math.nan, 0.1], 5),  # what is not finite is no improvement
    ],
)
def test_it_stops_after_so_many_evaluations_in_a_row_without_an_improvement(values: list[float], after: int | None) -> None:
    found, reason = stopped_after(values, EarlyStopping(patience=3))
    assert found == after
    assert reason == ("" if after is None else "eval/accuracy has not improved on 0.2 (step 20) for 3 evaluations")


def test_a_smaller_change_than_min_delta_is_none_and_losses_go_down() -> None:
    assert stopped_after([1.0, 0.95, 0.91], EarlyStopping("eval/loss", patience=2, min_delta=0.1), "loss")[0] == 3
    assert stopped_after([1.0, 0.95, 0.91], EarlyStopping("loss", patience=2), "loss")[0] is None
    assert stopped_after([1.0, 0.9], EarlyStopping("mine", goal="max", patience=1), "mine")[0] == 2


def test_its_state_comes_back_and_less_patience_counts_at_once() -> None:
    early = EarlyStopping(patience=3)
    stopped_after([0.5, 0.4, 0.3], early)
    again, run = EarlyStopping(patience=2), FakeRun()
    again.load_state_dict(early.state_dict())
    again.on_start(run)
    assert run.stopped == "eval/accuracy has not improved on 0.5 (step 10) for 2 evaluations"
    other, run = EarlyStopping("loss", patience=2), FakeRun()  # of another metric nothing is known
    other.load_state_dict(early.state_dict())
    other.on_start(run)
    assert not run.stopped


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ConfigError, match="is '', and the run does not know"):
        EarlyStopping().on_start(FakeRun(goals={}))
    with pytest.raises(ConfigError, match=r"is 'acuracy', and the run does not know .*(.|\n)*one of accuracy"):
        EarlyStopping("acuracy").on_start(FakeRun())
    early = EarlyStopping("mine", goal="max")
    early.on_start(FakeRun())
    with pytest.raises(ConfigError, match="does not measure"):
        early.on_evaluation(FakeRun(), {"loss": 1.0})
