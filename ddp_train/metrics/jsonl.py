"""metrics.jsonl: one object per line, consistent over a resume; lines wait in memory while the disk is full."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_train.system.files import GrowingFile, json_object

FILE = "metrics.jsonl"


class JsonLines:
    """Appends every record to the run's metrics.jsonl, at once or as soon as there is space again.

    Args:
        step: the step that this attempt begins at; later lines, of an attempt that got further than its last checkpoint, are dropped.
    """

    def __init__(self, run_dir: str, step: int = 0) -> None:
        self._file = GrowingFile(Path(run_dir) / FILE, keeps=lambda line: (json_object(line) or {}).get("step", math.inf) <= step)

    def write(self, record: Mapping[str, Any]) -> None:
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._file.append(json.dumps(finite))  # JSON has no NaN: null

    def close(self) -> None:
        self._file.close()
