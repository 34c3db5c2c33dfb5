"""Losses and gradients that are not finite, and spikes of the loss: found at the log step and before a save, step by step.

The losses of a window come to the host with the reduction that its record needs anyway. Decisions depend on reduced values alone, so all
ranks decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ddp_train.errors import NonFiniteLossError
from ddp_train.loader.order import BatchOrder
from ddp_train.training.record.log_window import LogWindow, Reading
from ddp_train.training.record.records import RunEvent, run_event
from ddp_train.training.train_state import TrainState

_HISTORY = 50  # steps that a loss is compared with
_MIN_HISTORY = 20
_MIN_SPREAD = 0.01  # of the median: where the losses hardly differ, 1% is no spike
_MAX_SKIPPED_IN_A_ROW = 100  # a loss scaler that starts far too high needs some twenty
_SHOWN_SAMPLES = 8


class Rewind(Exception):
    """Go back to the newest checkpoint, and on with the data after the present batch. All ranks raise it at the same step."""

    def __init__(self, event: RunEvent, happened: str) -> None:
        super().__init__(happened)
        self.event, self.happened = event, happened


@dataclass(kw_only=True)
class LossMonitor:
    """Judges each step by its loss and gradient norm: reports it, stops the run or rewinds it."""

    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"  # skip: the step guard has left the step out, and it is reported here
    spike_zscore: float | None = None  # a loss with this robust z-score or a higher one is a spike; None: spikes are not looked for
    on_spike: Literal["warn", "rewind"] = "warn"
    log_event: Callable[[RunEvent, str], None] = lambda event, line: None  # takes an event, and its line for the screen; rank 0 writes them

    def judge(self, window: LogWindow, reading: Reading, state: TrainState, order: BatchOrder, *, is_scaled: bool = False) -> float:
        """Judge the steps of the window that were not judged yet.

        `is_scaled`: a loss scaler leaves out the steps whose gradient is not finite, as it should; they are not reported.

        Returns the mean loss of all its steps over all ranks; NaN where none of them counts.

        Raises NonFiniteLossError: a loss, or the newest gradient norm, is not finite, and the run cannot go on.
        Raises Rewind: the run can go on from the newest checkpoint.
        """
        totals, num_units, norms = reading.totals, reading.num_units, reading.norms
        newest = 0.0 if reading.grad_norm is None else reading.grad_norm
        skipped = []
        first = len(totals) - window.steps  # the steps before were judged before their checkpoint was written
        for index in range(max(first, window.num_judged), len(totals)):
            loss = totals[index] / (num_units[index] or 1.0)  # 0: nothing counted
            is_newest = index == len(totals) - 1
            norm = norms[index - window.num_judged] if norms else newest if is_newest else 0.0
            step = partial(_step_at, index - first, window, state, order)  # its samples are looked up only where something is wrong
            if norms and not math.isfinite(norm):
                skipped.append(index)
                self._on_skipped(step(), state, loss, norm, is_scaled=is_scaled)
            elif not math.isfinite(loss) or not (is_scaled or math.isfinite(norm)):
                self._on_nonfinite_step(step(), loss, norm, first=state.step - window.steps + 1, last=state.step)
            else:
                state.skipped_in_a_row = 0
                if self.spike_zscore is not None:
                    self._judge_spike(step, state, loss, window.turns_of(index))
        window.mark_judged(num_units, skipped=skipped)
        counted = sorted({*range(len(totals))}.difference(skipped))
        return float(sum(totals[index] for index in counted) / (sum(num_units[index] for index in counted) or math.nan))

    def _on_skipped(self, step: _Step, state: TrainState, loss: float, norm: float, *, is_scaled: bool) -> None:
        state.skipped_in_a_row += 1
        values = f"loss {loss:g}, gradient norm {norm:g}"
        if not (is_scaled and math.isfinite(loss)):  # else the loss scaler is finding its scale
            self.log_event(step.event("skipped", loss=loss, grad_norm=norm), f"step {step.number} skipped: {values}; {step.samples_text()}")
        if state.skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            happened = f"the last {state.skipped_in_a_row} steps up to step {step.number} were all skipped: {values}"
            expected = "finite losses and gradients, except for single batches"
            fix = "a smaller optimizer.lr, or amp=off to see whether precision is the cause"
            raise NonFiniteLossError(key="health.on_nonfinite", happened=happened, expected=expected, fix=fix)

    def _on_nonfinite_step(self, step: _Step, loss: float, norm: float, *, first: int, last: int) -> None:
        value = f"the training loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        among = f", the first one in steps {first} to {last}" if last > first else ""
        happened = f"{value} at step {step.number}{among}; {step.samples_text()}"
        event = step.event("nonfinite", loss=loss, grad_norm=norm)
        if self.on_nonfinite == "rewind":
            raise Rewind(event, happened)
        self.log_event(event, "")
        fix = "a smaller optimizer.lr, trainer.clip_grad_norm=1.0, or amp=off to see whether precision is the cause;"
        fix += " for single bad batches health.on_nonfinite=skip or rewind"
        raise NonFiniteLossError(key="optimizer.lr", happened=happened, expected="a finite loss", fix=fix)

    def _judge_spike(self, get_step: Callable[[], _Step], state: TrainState, loss: float, turns: str) -> None:
        earlier = state.losses.get(turns, [])  # of steps with the same turns: others have another loss
        zscore = robust_zscore(loss, earlier)
        if zscore is not None and self.spike_zscore is not None and zscore >= self.spike_zscore:
            step = get_step()
            event = step.event("spike", loss=loss, zscore=round(zscore, 3))
            median = statistics.median(earlier)
            happened = f"the loss {loss:.4g} at step {step.number} is a spike, z-score {zscore:.1f} over the median {median:.4g}"
            happened += f" of the {len(earlier)} steps before{f' of {turns}' if turns else ''}; {step.samples_text()}"
            if self.on_spike == "rewind":
                raise Rewind(event, happened)
            self.log_event(event, happened)
        state.losses[turns] = [*earlier, loss][-_HISTORY:]


def robust_zscore(loss: float, earlier: Sequence[float]) -> float | None:
    """Return by how many robust standard deviations a loss is above the losses before it; None: these are too few.

    Median and MAD instead of mean and standard deviation, which an earlier spike would move (Iglewicz & Hoaglin 1993).
    """
    if len(earlier) < _MIN_HISTORY:
        return None
    median = statistics.median(earlier)
    spread = 1.4826 * statistics.median(abs(value - median) for value in earlier)
    floor = max(_MIN_SPREAD * abs(median), 1e-12)
    return (loss - median) / max(spread, floor)


def _step_at(index: int, window: LogWindow, state: TrainState, order: BatchOrder) -> _Step:
    position = state.position - window.samples
    for _ in range(index):
        position += order.batch_at(position).size
    batch = order.batch_at(position)
    ids = order.indices(*batch)
    return _Step(state.step - window.steps + index + 1, position, batch.size, None if ids is None else ids.tolist())


@dataclass(frozen=True)
class _Step:
    """One step of a window, and its global batch."""

    number: int
    position: int  # the data's, before it
    size: int
    ids: list[int] | None  # the data set's indices of the whole global batch; None: the data is a stream, whose samples have none

    def samples_text(self) -> str:
        if self.ids is None:
            return f"its {self.size} samples are of a stream, and have no numbers"
        more = f" and {len(self.ids) - _SHOWN_SAMPLES} more (events.jsonl)" if len(self.ids) > _SHOWN_SAMPLES else ""
        return f"its samples: {', '.join(map(str, self.ids[:_SHOWN_SAMPLES]))}{more}"

    def event(self, kind: str, **values: float) -> RunEvent:
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}  # JSON has no NaN
        return run_event(kind, self.number, **finite, samples=self.position, sample_ids=self.ids)
