"""One progress line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_HIDDEN = ("split", "step", "epoch", "samples", "time", "lr", "grad_norm", "step_ms", "data_wait_ms", "samples_per_s")


class Console:
    """Shows how far the run is, the loss, samples per second and the time that is left.

    The line is redrawn at log steps only: a redrawing thread would take the interpreter from the loop.

    Args:
        total_steps: optimizer steps of the whole run.
        step: the step that this attempt begins at.
    """

    def __init__(self, total_steps: int, step: int = 0) -> None:
        self._total_steps = total_steps
        self._started, self._first_step = time.monotonic(), step
        self._progress: Progress | None = None
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=RichConsole(file=sys.stdout),
                auto_refresh=False,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=step, numbers="")
            self._progress.start()
            self._progress.console.show_cursor(True)  # rich hides it, and a rank that is killed could not bring it back

    def write(self, record: Mapping[str, Any]) -> None:
        """Show one record."""
        text = _text(record)
        if self._progress is None:
            print(f"{self._where(record)}  {text}  {self._left(record)}".rstrip(), flush=True)
        elif record["split"] == "train":
            self._progress.update(self._task, completed=record["step"], numbers=text, refresh=True)
        else:
            self._progress.console.print(f"{self._where(record)}  {text}", highlight=False)

    def close(self) -> None:
        """Leave the line as it is."""
        if self._progress is not None:
            self._progress.stop()

    def _where(self, record: Mapping[str, Any]) -> str:
        width = len(str(self._total_steps))
        return f"step {record['step']:>{width}}/{self._total_steps}  {record['split']:<5}"

    def _left(self, record: Mapping[str, Any]) -> str:
        done = record["step"] - self._first_step
        if record["split"] != "train" or done <= 0:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self._total_steps - record["step"])
        return f"{_clock(seconds)} left"


def _text(record: Mapping[str, Any]) -> str:
    parts = [f"{name} {value:.4g}" for name, value in record.items() if name not in _HIDDEN and isinstance(value, (int, float))]
    if "samples_per_s" in record:
        parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
