"""What a tracker is told of one step: its numbers, and the images and texts that callbacks show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AXES = ("split", "step", "time")


@dataclass(frozen=True)
class Shown:
    """An image or a text."""

    name: str
    content: NDArray[np.uint8] | str  # pixels [H, W, 3], grey ones [H, W]; or Markdown

    @property
    def size(self) -> int:
        """Bytes, or characters."""
        return len(self.content) if isinstance(self.content, str) else self.content.nbytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """All that was recorded and shown of one step."""

    step: int
    time: float  # seconds since 1970, of its first record
    values: Mapping[str, float]  # as `split/name`; epoch and samples without a split
    shown: Sequence[Shown] = ()


def row_of(step: int, records: Sequence[Mapping[str, Any]], shown: Sequence[Shown] = ()) -> Row:
    """Return a step's row, of its lines of metrics.jsonl."""
    values: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name not in _AXES and isinstance(value, (int, float)):
                values[name if name in ("epoch", "samples") else f"{record['split']}/{name}"] = value
    return Row(step=step, time=records[0]["time"] if records else time.time(), values=values, shown=shown)


def rows_in(history: Path, *, after: int, until: int) -> Iterator[Row]:
    """Yield what metrics.jsonl has of the steps after one, until another."""
    records = []
    for line in history.read_text().splitlines() if history.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a kill has left it half written
            continue
        if after < record["step"] <= until:
            records.append(record)
    for step, each in groupby(records, key=lambda record: record["step"]):
        yield row_of(step, [*each])
