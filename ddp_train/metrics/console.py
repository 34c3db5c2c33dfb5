"""One progress line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from ddp_train.system.phase import Phase, Phases
from ddp_train.system.terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress

_HIDDEN = (
    *("split", "step", "epoch", "samples", "time", "lr", "grad_norm", "step_ms", "data_wait_ms"),
    *("samples_per_s", "samples_per_s_per_device", "tokens_per_s", "tokens_per_s_per_device", "mfu"),  # in another form, or not at all
    *("device/memory_gib", "device/reserved_gib", "device/host_gib", "compile/graphs", "compile/recompiles", "compile/seconds"),
)
_OTHER_COLUMNS = 40  # characters of the progress line: the bar, the time that is left, spaces
_REDRAW_S = 0.5  # a drawing takes about a millisecond of Python, in which the loop waits
_POLL_S = 0.02
_PHASE_TEXTS = {Phase.EVALUATION: "evaluating", Phase.SAVE: "saving"}


class Console:
    """Shows the run's progress: step and epoch, the loss, samples per second, and the time that is left.

    On a terminal a thread reads the rank's phase, twice a second at most, and redraws the line; the loop only stores its numbers. It
    draws right after the rank has moved, and never while it stands still: another rank's failure stays readable on the terminal. The thread
    also creates the line: importing rich takes 40 ms, for which no first step waits.

    Args:
        total_steps: optimizer steps of the whole run.
        step: the step that this attempt begins at.
        phases: has rank 0's phase; None: the line moves with the records.
        epoch: the epochs that this attempt begins at; None: the data has none.
        steps_per_epoch: optimizer steps; None: the data has no epochs.
    """

    def __init__(
        self,
        total_steps: int,
        step: int = 0,
        phases: Phases | None = None,
        epoch: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self._total_steps, self._first_step = total_steps, step
        self._phases, self._has_phases = phases or Phases(), phases is not None
        self._first_epoch, self._steps_per_epoch = epoch, steps_per_epoch
        self._started = time.monotonic()
        self._numbers = self._if_room = ""
        self._drawn, self._drawn_since = (Phase.START, step), self._started
        # The log of rank 0 has every record already, and needs no progress line.
        self._file = Terminal(sys.stdout.fileno(), owns=False) if isinstance(sys.stdout, Terminal) else sys.stdout
        self._progress: Progress | None = None
        self._covered: list[Terminal] = []  # streams whose text is printed above the line
        self._is_closed, self._line_lock = Event(), Lock()
        self._thread: Thread | None = None
        if self._file.isatty():
            self._thread = Thread(target=self._follow, name="progress-line", daemon=True)
            self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        if not self._has_phases:
            self._phases.enter(Phase.STEP, record["step"])
        if self._thread is None:
            print(f"{self._where(record)}  {_text(record)}  {self._left(record)}".rstrip(), file=self._file, flush=True)
        elif record["split"] == "train":
            self._numbers, self._if_room = _text(record), _text_if_room(record)
        else:
            self._line().console.print(f"{self._where(record)}  {_text(record)}", highlight=False)

    def close(self) -> None:
        if self._thread is None or self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join()
        self._draw()
        for stream in self._covered:
            stream.screen = None
        self._line().stop()

    def _line(self) -> Progress:
        with self._line_lock:
            if self._progress is None:
                self._progress = self._show_line()
            return self._progress

    def _show_line(self) -> Progress:
        from rich.console import Console as RichConsole
        from rich.file_proxy import FileProxy
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = RichConsole(file=self._file)
        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        step, epoch = self._first_step, self._epoch(self._first_step)
        self._task = progress.add_task("", total=self._total_steps, completed=step, epoch=epoch, numbers="")
        progress.start()
        progress.console.show_cursor(True)  # rich hides it, and a killed rank could not show it again
        self._covered = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Terminal) and stream.isatty()]
        for stream in self._covered:
            stream.screen = FileProxy(console, stream)  # type: ignore[assignment]
        return progress

    def _follow(self) -> None:
        if not self._is_closed.wait(_REDRAW_S):
            self._line()
        while not self._is_closed.wait(_REDRAW_S):
            seen = self._phases.count
            while self._phases.count == seen:
                if self._is_closed.wait(_POLL_S):
                    return
            self._draw()

    def _draw(self) -> None:
        line = self._line()
        phase, step = position = self._phases.phase, self._phases.step
        if position != self._drawn:
            self._drawn, self._drawn_since = position, time.monotonic()
        doing = f"{_PHASE_TEXTS[phase]} {_clock(time.monotonic() - self._drawn_since)}  " if phase in _PHASE_TEXTS else ""
        epoch, numbers = self._epoch(step), doing + self._numbers
        room = line.console.width - _OTHER_COLUMNS - 2 * len(str(self._total_steps)) - len(epoch) - len(numbers)
        numbers += self._if_room if len(self._if_room) <= room else ""
        line.update(self._task, completed=step, epoch=epoch, numbers=numbers, refresh=True)

    def _epoch(self, step: int) -> str:
        if self._first_epoch is None or self._steps_per_epoch is None:
            return ""
        epoch, last = (self._first_epoch + (until - self._first_step) / self._steps_per_epoch for until in (step, self._total_steps))
        return f"epoch {epoch:.2f}/{round(last, 2):g}"

    def _where(self, record: Mapping[str, Any]) -> str:
        epoch = f"  epoch {record['epoch']:.2f}" if record["epoch"] is not None else ""
        return f"step {record['step']:>{len(str(self._total_steps))}}/{self._total_steps}{epoch}  {record['split']:<5}"

    def _left(self, record: Mapping[str, Any]) -> str:
        done = record["step"] - self._first_step
        if record["split"] != "train" or done <= 0:
            return ""
        return f"{_clock((time.monotonic() - self._started) / done * (self._total_steps - record['step']))} left"


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


def _text_if_room(record: Mapping[str, Any]) -> str:
    text = f"  lr {record['lr']:.3g}" if "lr" in record else ""
    return text + (f"  data wait {record['data_wait_ms'] / record['step_ms']:.0%}" if record.get("step_ms") else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
