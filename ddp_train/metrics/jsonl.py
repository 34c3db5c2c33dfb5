"""metrics.jsonl: one object per line, consistent over a resume; lines wait in memory while the disk is full."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_train.metrics.growing_file import GrowingFile


class JsonLines:
    """Appends every record to the run's metrics.jsonl.

    Args:
        run_dir: the run folder.
        step: the step that this attempt begins at; lines after it are from an attempt that got further than its last checkpoint, and go.
    """

    def __init__(self, run_dir: str, step: int = 0) -> None:
        self._file = GrowingFile(Path(run_dir) / "metrics.jsonl", keeps=lambda line: 0 <= _step(line) <= step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, at once or as soon as there is space again."""
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._file.append(json.dumps(finite))  # JSON has no NaN: null

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines are waiting, and there is no space for them still.
        """
        self._file.close()


def _step(line: str) -> int:
    """Return the step of a line, -1 for one that a kill left half written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
