"""metrics.jsonl: one object per line, consistent over a resume; lines wait in memory while the disk is full."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_train.system.files import GrowingFile

_NAME = "metrics.jsonl"


class JsonLines:
    """Appends every record to the run's metrics.jsonl, at once or as soon as there is space again.

    Args:
        step: the step that this attempt begins at; later lines, of an attempt that got further than its last checkpoint, are dropped.
    """

    def __init__(self, run_dir: str, step: int = 0) -> None:
        self._file = GrowingFile(Path(run_dir) / _NAME, keeps=lambda line: any(record["step"] <= step for record in _parse(line)))

    def write(self, record: Mapping[str, Any]) -> None:
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._file.append(json.dumps(finite))  # JSON has no NaN: null

    def close(self) -> None:
        self._file.close()


def read_records(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in metrics.jsonl; nothing if there is no such file."""
    if (path := run_dir / _NAME).exists():
        for line in path.read_text().splitlines():
            yield from _parse(line)


def _parse(line: str) -> Iterator[dict[str, Any]]:
    """Yield the record of a line; nothing for one that a kill left half written."""
    with suppress(ValueError, TypeError):
        record = json.loads(line)
        if "step" in record and "split" in record:
            yield record
