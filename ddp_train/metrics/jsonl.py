"""metrics.jsonl: one object per line, consistent over a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_train.run_dir import RunDir, write_atomic


class JsonLines:
    """Appends every record to the run's metrics.jsonl.

    Args:
        run_dir: the run folder.
        step: the step that this attempt begins at; lines after it are from an attempt that got further than its last checkpoint, and go.
    """

    def __init__(self, run_dir: str, step: int = 0) -> None:
        path = RunDir(Path(run_dir)).metrics
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) is not None and _step(line) <= step]  # type: ignore[operator]
            write_atomic(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", buffering=1)  # a line is written as soon as it is whole

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")  # JSON has no NaN: null

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step(line: str) -> int | None:
    """Return the step of a line, None for one that a kill left half written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
