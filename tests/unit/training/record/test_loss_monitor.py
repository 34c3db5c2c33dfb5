"""Losses that are lost or stand out: which step, which samples, what is done, and the same after a resume."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from ddp_train.distributed.world import alone
from ddp_train.errors import NonFiniteLossError
from ddp_train.loader.order import BatchOrder, SampleOrder
from ddp_train.loader.sampler import Shuffled
from ddp_train.training.record.log_window import LogWindow
from ddp_train.training.record.logged import Reduction
from ddp_train.training.record.loss_monitor import LossMonitor, Rewind, RunEvent, robust_zscore
from ddp_train.training.train_state import TrainState

BATCH = 4
ORDER = SampleOrder(Shuffled(22, seed=0), global_batch_size=BATCH, drop_last=False)
NAN = float("nan")


def noise(count: int) -> list[float]:
    draw = random.Random(0)
    return [2.0 + draw.uniform(-0.1, 0.1) for _ in range(count)]


class Told:
    """A watch, and what it told."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[RunEvent] = []
        self.lines: list[str] = []
        self.watch = LossMonitor(**settings, log_event=self._tell)

    def _tell(self, event: RunEvent, line: str) -> None:
        self.events.append(event)
        self.lines.append(line)

    def judge(
        self,
        losses: list[float],
        state: TrainState,
        *,
        norms: list[float] | None = None,
        order: Any = ORDER,
        grad_norm: Any = None,
        turns: list[list[str]] | None = None,
        **known: Any,
    ) -> float:
        """Take a window of steps with these mean losses, and look at them."""
        window = LogWindow(torch.device("cpu"), turns={name for taken in turns or [] for name in taken})
        window.restart(state.saved_window)
        for place, loss in enumerate(losses):
            window.begin_step()
            window.add(torch.tensor(loss * BATCH, dtype=torch.float64))
            if turns:
                window.begin_turns(turns[place])
            norm = torch.tensor(norms[place]) if norms else None
            window.end_step(float(BATCH), samples=order.batch_at(state.position).size, norm=norm)
            state.step, state.position = state.step + 1, state.position + order.batch_at(state.position).size
        mean = self.watch.judge(window, window.read(Reduction(alone()), grad_norm), state, order, **known)
        state.saved_window = window.to_saved()
        return mean


def test_the_zscore_is_that_of_median_and_mad_and_its_spread_has_a_floor() -> None:
    before = [1.0, 2.0, 3.0, 4.0, 100.0] * 4  # median 3, MAD 1
    assert robust_zscore(3.0 + 1.4826 * 8, before) == pytest.approx(8)
    assert robust_zscore(2.0, before) == pytest.approx(-1 / 1.4826)
    assert robust_zscore(2.2, [2.0] * 50) == pytest.approx(10)  # 1% of the median is one deviation
    assert robust_zscore(1000.0, [2.0] * 19) is None


def test_a_spike_is_told_with_its_step_and_the_samples_of_all_ranks() -> None:
    told, state = Told(spike_zscore=8), TrainState()
    told.judge([*noise(30), 9.0, *noise(3)], state)
    (event,) = told.events
    assert (event["kind"], event["step"], event["loss"]) == ("spike", 31, 9.0)
    assert event["zscore"] > 8
    epoch, start = divmod(event["samples"], 22)
    assert event["sample_ids"] == ORDER.indices(epoch, start, min(start + BATCH, 22)).tolist()  # epochs end with a batch of two
    assert "step 31 is a spike" in told.lines[0]
    assert len(state.losses[""]) == 34


def test_a_step_that_takes_a_turn_besides_is_compared_with_its_like() -> None:
    """Every tenth step has the generator's loss, too; after 30 such steps one stands out among them, and in no other."""
    told, state = Told(spike_zscore=8), TrainState()
    turns = [["critic", "generator"] if place % 10 == 9 else ["critic"] for place in range(300)]
    losses = [loss + 40 * (len(taken) == 2) for loss, taken in zip(noise(300), turns, strict=True)]
    told.judge(losses, state, turns=turns)
    assert not told.events
    state.saved_window = None
    told.judge([42.0], state, turns=[["critic"]])
    told.judge([60.0], state, turns=[["critic", "generator"]])
    assert [event["step"] for event in told.events] == [301, 302]
    assert "of the 30 steps before of critic, generator;" in told.lines[1]


@pytest.mark.parametrize("cut", [1, 17, 33])
def test_the_history_of_losses_is_resumed(cut: int) -> None:
    losses = [*noise(30), 9.0, *noise(40), 9.0]
    whole, state = Told(spike_zscore=8), TrainState()
    mean = whole.judge(losses, state)

    parts, resumed = Told(spike_zscore=8), TrainState()
    parts.judge(losses[:cut], resumed)
    saved, window = resumed.state_dict(), resumed.saved_window
    resumed = TrainState(saved_window=window)
    resumed.load_state_dict(saved)
    assert parts.judge(losses[cut:], resumed) == mean
    assert [(event["step"], event["zscore"], event["sample_ids"]) for event in parts.events] == [
        (event["step"], event["zscore"], event["sample_ids"]) for event in whole.events
    ]
    assert (resumed.losses, resumed.position) == (state.losses, state.position)
    assert len(state.losses[""]) == 50


def test_the_first_lost_step_is_named_with_its_samples_and_the_steps_looked_at() -> None:
    told, state = Told(), TrainState()
    told.judge(noise(3), state)
    state.saved_window = None
    with pytest.raises(
        NonFiniteLossError, match=r"loss is nan at step 5, the first one in steps 4 to 7; its samples: \d+, \d+, \d+, \d+\n"
    ):
        told.judge([2.0, NAN, 2.0, NAN], state)
    assert (told.events[0]["kind"], told.events[0]["step"], told.events[0]["loss"]) == ("nonfinite", 5, "nan")


def test_a_gradient_that_is_lost_in_the_newest_step_is_found_before_the_next_loss() -> None:
    with pytest.raises(NonFiniteLossError, match="gradient norm is inf at step 2"):
        Told().judge([2.0, 2.0], TrainState(), grad_norm=torch.tensor(float("inf")))
    assert Told().judge([2.0, 2.0], TrainState(), grad_norm=torch.tensor(float("inf")), is_scaled=True) == 2.0


def test_skipped_steps_are_told_counted_and_left_out_of_the_mean() -> None:
    told, state = Told(on_nonfinite="skip"), TrainState()
    assert told.judge([1.0, NAN, 3.0, 4.0], state, norms=[1.0, NAN, 1.0, float("inf")]) == 2.0
    assert [(event["kind"], event["step"]) for event in told.events] == [("skipped", 2), ("skipped", 4)]
    assert told.lines[0].startswith("step 2 skipped: loss nan, gradient norm nan; its samples: ")
    assert state.saved_window is not None
    assert (state.saved_window.skipped_steps, state.saved_window.losses, state.skipped_in_a_row) == (2, [4.0, 0.0, 12.0, 0.0], 1)
    assert math.isnan(Told(on_nonfinite="skip").judge([NAN], TrainState(), norms=[NAN]))  # and not 0
    with pytest.raises(NonFiniteLossError, match="the last 100 steps up to step 103 were all skipped"):
        told.judge([NAN] * 99, state, norms=[NAN] * 99)


def test_a_loss_scaler_that_finds_its_scale_is_no_event() -> None:
    told, state = Told(on_nonfinite="skip"), TrainState()
    told.judge([1.0, 2.0], state, norms=[float("inf"), 1.0], is_scaled=True)
    assert not told.events
    assert state.saved_window is not None
    assert state.saved_window.skipped_steps == 1


@pytest.mark.parametrize(
    ("settings", "losses"),
    [({"on_nonfinite": "rewind"}, [2.0, NAN]), ({"spike_zscore": 8, "on_spike": "rewind"}, [*noise(30), 9.0])],
)
def test_a_rewind_is_asked_for_with_the_event_that_caused_it(settings: dict[str, Any], losses: list[float]) -> None:
    with pytest.raises(Rewind) as found:
        Told(**settings).judge(losses, TrainState())
    assert found.value.event["step"] == len(losses)
    assert found.value.event["sample_ids"]


def test_samples_of_a_stream_have_no_numbers_and_that_is_said() -> None:
    with pytest.raises(NonFiniteLossError, match="its 4 samples are of a stream"):
        Told().judge([NAN], TrainState(), order=BatchOrder(None, global_batch_size=BATCH))
