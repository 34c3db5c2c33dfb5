"""How far a run is and how fast, from what it leaves in its folder while it trains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ddp_train.run_folder.attempts import steps_taken
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import tail

_TAIL_BYTES = 20_000  # of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The newest numbers of a run. None: there are none yet."""

    step: int
    epoch: float | None
    loss: float | None
    step_s: float | None

    def line(self, *, max_steps: int | None, max_epochs: float | None) -> str:
        """Say it in one line.

        Args:
            max_steps: the run ends after so many steps, or
            max_epochs: after so many epochs.
        """
        parts = [f"step {self.step}" + (f" of {max_steps}" if max_steps is not None else "")]
        if self.epoch is not None and max_epochs is not None:
            parts.append(f"epoch {self.epoch:.2f} of {max_epochs:g}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.step_s:
            parts.append(f"{1 / self.step_s:.3g} steps/s")
            if max_steps is not None and max_steps > self.step:
                parts.append(f"{_duration((max_steps - self.step) * self.step_s)} left")
        return ", ".join(parts)


def progress(run_folder: RunFolder) -> Progress | None:
    """Return how far a run is; None before its first step."""
    newest: dict[str, Any] = {}
    for line in tail(run_folder.metrics, _TAIL_BYTES).splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut off
            continue
        if isinstance(record, dict) and record.get("split") == "train":
            newest = record
    step = max(newest.get("step", 0), steps_taken(run_folder)[0])
    if not step:
        return None
    step_ms = newest.get("step_ms")
    return Progress(step=step, epoch=newest.get("epoch"), loss=newest.get("loss"), step_s=step_ms / 1000 if step_ms else None)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes == 0:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
