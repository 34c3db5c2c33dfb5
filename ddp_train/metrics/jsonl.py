"""metrics.jsonl: one object per line, consistent over a resume; lines wait in memory while the disk is full."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_train.system.files import write_atomic


class JsonLines:
    """Appends every record to the run's metrics.jsonl.

    Args:
        run_dir: the run folder.
        step: the step that this attempt begins at; lines after it are from an attempt that got further than its last checkpoint, and go.
    """

    def __init__(self, run_dir: str, step: int = 0) -> None:
        self._path = Path(run_dir) / "metrics.jsonl"
        if self._path.exists():
            lines = self._path.read_text().splitlines()
            kept = [line for line in lines if _step(line) is not None and _step(line) <= step]  # type: ignore[operator]
            write_atomic(self._path, "".join(f"{line}\n" for line in kept))
        self._file = self._path.open("ab", buffering=0)
        self._waiting = b""
        self._is_late = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, at once or as soon as there is space again."""
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._waiting += f"{json.dumps(finite)}\n".encode()  # JSON has no NaN: null
        try:
            self._flush()
        except OSError as error:
            if not self._is_late:
                print(f"{self._path.name} cannot be written ({error.strerror}); training goes on, its lines wait in memory", flush=True)
            self._is_late = True
        else:
            if self._is_late:
                print(f"{self._path.name} is complete again", flush=True)
            self._is_late = False

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines are waiting, and there is no space for them still.
        """
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        while self._waiting:
            written = os.write(self._file.fileno(), self._waiting)  # where little space is left, a part of it
            self._waiting = self._waiting[written:]


def _step(line: str) -> int | None:
    """Return the step of a line, None for one that a kill left half written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
