"""Looks for the checkpoints of a run that goes on beside this process, until no more will come (rank 0 of an evaluation with --watch)."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.verify import COMPLETE
from ddp_train.errors import printable
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Outcome, progress_of, verdict_of

LOOK_EVERY_S = 2.0
_SAY_EVERY_S = 300.0


class CheckpointWatch:
    """Finds each checkpoint of a run once, the oldest first; one that its run has saved again, after it went back, once more.

    Args:
        seen: steps of checkpoints that nobody wants again, as they are now.
    """

    def __init__(self, run: Path, *, seen: Collection[int] = ()) -> None:
        self._run_folder = RunFolder(run)
        self._marks = {entry.step: mark for entry in self._saved() if entry.step in seen and (mark := _mark(entry.path))}
        self._said_at = time.monotonic()

    def look(self) -> Path | float | None:
        """Return the next checkpoint, or after how many seconds to look again, or None: there will be no more."""
        verdict = verdict_of(self._run_folder)  # asked first: what is saved then is all that there will be
        for entry in self._saved():
            mark = _mark(entry.path)
            if mark and self._marks.get(entry.step) != mark:
                self._marks[entry.step] = mark
                return entry.path
        if verdict.outcome is not Outcome.AGAIN:
            return None
        if time.monotonic() > self._said_at + _SAY_EVERY_S:
            print(printable(f"waiting for {self._run_folder.shown()}: {progress_of(self._run_folder, verdict)}"), flush=True)
            self._said_at = time.monotonic()
        return LOOK_EVERY_S

    def _saved(self) -> list[catalog.CatalogEntry]:
        return catalog.saved(self._run_folder.checkpoints)


def _mark(checkpoint: Path) -> str:
    """Return what tells a checkpoint from another one of the same step; "" where it has just been removed."""
    with suppress(OSError):
        return (checkpoint / COMPLETE).read_text()
    return ""
