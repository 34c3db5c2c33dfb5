"""A few lines that move on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread
from typing import Any

from ddp_train.model_log import AXES
from ddp_train.system.phase import Phase, Phases
from ddp_train.system.terminal import Foot, Terminal, free_foot

_HIDDEN = (
    *(*AXES, "lr", "grad_norm", "step_ms", "data_wait_ms"),
    *("samples_per_s", "samples_per_s_per_device", "tokens_per_s", "tokens_per_s_per_device", "mfu"),  # in another form, or not at all
    *("device/memory_gib", "device/reserved_gib", "device/host_gib", "compile/graphs", "compile/recompiles", "compile/seconds"),
)
_LINES = 7  # of the terminal, at most
_BAR_WIDTH, _CURVE_WIDTH = 20, 40  # characters, at most
_LEVELS = "▁▂▃▄▅▆▇█"
_REDRAW_S = 0.5
_NOTES_EVERY_S = 2.0  # they are read from files
_JOIN_S = 2.0  # a file system that hangs does not hold up the end
_PHASE_TEXTS = {Phase.EVALUATION: "evaluating", Phase.SAVE: "saving"}


class Console:
    """Shows the run's progress: step, epoch and the time that is left; the loss and its curve, rates, the best values; where the time goes.

    On a terminal a thread draws them twice a second into its last lines; the loop only stores its numbers.

    Args:
        total_steps: optimizer steps of the whole run.
        step: the step that this attempt begins at.
        phases: of rank 0; its `phase` and `step` say where it is at any moment.
        epoch: the epochs that this attempt begins at; None: the data has none.
        steps_per_epoch: optimizer steps; None: the data has no epochs.
        notes: returns more lines about the run, each with a word in front.
    """

    def __init__(
        self,
        total_steps: int,
        step: int,
        phases: Phases,
        epoch: float | None = None,
        steps_per_epoch: int | None = None,
        notes: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._total_steps, self._first_step = total_steps, step
        self._phases = phases
        self._first_epoch, self._steps_per_epoch = epoch, steps_per_epoch
        self._started = time.monotonic()
        self._numbers = ""  # of the newest training record
        self._losses: list[float] = []  # means of equally many records each: the curve is that of the whole attempt
        self._records_per_loss, self._newest_losses = 1, list[float]()
        self._read_notes, self._notes, self._notes_at = notes or tuple, list[str](), -_NOTES_EVERY_S
        self._shown, self._shown_since = (Phase.START, step), self._started
        # The log of rank 0 has every record already, and needs no moving lines.
        self._file = Terminal(sys.stdout.fileno(), owns=False) if isinstance(sys.stdout, Terminal) else sys.stdout
        self._is_closed = Event()
        self._thread: Thread | None = None
        if self._file.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._thread = Thread(target=self._follow, name="progress-lines", daemon=True)
            self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        if self._thread is None:
            left = self._left(record["step"]) if record["split"] == "train" else ""
            print(f"{self._where(record)}  {_text(record)}  {left}".rstrip(), file=self._file, flush=True)
        elif record["split"] == "train":
            self._numbers = _text(record) + _more_text(record)
            if (loss := record.get("loss")) is not None:
                self._add_loss(loss)
        else:
            print(f"{self._where(record)}  {_text(record)}", file=self._file, flush=True)

    def close(self) -> None:
        """Leave the line of the progress alone on the terminal."""
        if self._thread is not None and not self._is_closed.is_set():
            self._is_closed.set()
            self._thread.join(_JOIN_S)
            free_foot(self._file.fileno())
            print(self._head(), file=self._file, flush=True)

    def _follow(self) -> None:
        foot = Foot(self._file.fileno(), _LINES)
        while not self._is_closed.wait(_REDRAW_S):
            if time.monotonic() - self._notes_at >= _NOTES_EVERY_S:
                self._notes, self._notes_at = list(self._read_notes()), time.monotonic()
            numbers = [f"train    {self._curve()}{self._numbers}"] if self._numbers else []
            foot.draw(["", self._head(), *numbers, *self._notes])

    def _head(self) -> str:
        phase, step = position = self._phases.phase, self._phases.step
        if position != self._shown:
            self._shown, self._shown_since = position, time.monotonic()
        done = round(_BAR_WIDTH * step / self._total_steps)
        bar = "━" * done + "┄" * (_BAR_WIDTH - done)
        doing = f"{_PHASE_TEXTS[phase]} {_clock(time.monotonic() - self._shown_since)}" if phase in _PHASE_TEXTS else ""
        place = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        return "  ".join(filter(None, (place, self._epoch(step), bar, self._left(step), doing)))

    def _add_loss(self, loss: float) -> None:
        self._newest_losses.append(loss)
        if len(self._newest_losses) < self._records_per_loss:
            return
        self._losses.append(math.fsum(self._newest_losses) / len(self._newest_losses))
        self._newest_losses.clear()
        if len(self._losses) == _CURVE_WIDTH:
            self._losses = [(first + second) / 2 for first, second in zip(self._losses[::2], self._losses[1::2], strict=True)]
            self._records_per_loss *= 2

    def _curve(self) -> str:
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        if len(finite) < 2:
            return ""
        low, scale = min(finite), (len(_LEVELS) - 1) / ((max(finite) - min(finite)) or 1.0)
        return "".join(_LEVELS[round((loss - low) * scale)] if math.isfinite(loss) else "x" for loss in self._losses) + "  "

    def _epoch(self, step: int) -> str:
        if self._first_epoch is None or self._steps_per_epoch is None:
            return ""
        epoch, last = (self._first_epoch + (until - self._first_step) / self._steps_per_epoch for until in (step, self._total_steps))
        return f"epoch {epoch:.2f}/{round(last, 2):g}"

    def _where(self, record: Mapping[str, Any]) -> str:
        epoch = f"  epoch {record['epoch']:.2f}" if record["epoch"] is not None else ""
        return f"step {record['step']:>{len(str(self._total_steps))}}/{self._total_steps}{epoch}  {record['split']:<5}"

    def _left(self, step: int) -> str:
        done = step - self._first_step
        return f"{_clock((time.monotonic() - self._started) / done * (self._total_steps - step))} left" if done > 0 else ""


def _text(record: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {value:.4g}"
        for name, value in record.items()
        if name not in _HIDDEN and not name.startswith("samples/") and isinstance(value, (int, float))
    ]
    if "tokens_per_s" in record:
        parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    elif "samples_per_s" in record:
        parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    if "device/memory_gib" in record:
        parts.append(f"{record['device/memory_gib']:.3g} GiB")
    return "  ".join(parts)


def _more_text(record: Mapping[str, Any]) -> str:
    text = f"  lr {record['lr']:.3g}" if "lr" in record else ""
    return text + (f"  data wait {record['data_wait_ms'] / record['step_ms']:.0%}" if record.get("step_ms") else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
