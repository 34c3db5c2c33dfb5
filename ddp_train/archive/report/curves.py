"""The curves of a run for a page: thinned without losing a spike or a NaN, and marks of what happened at which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.run_folder.failure import load_report
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.times import read_times

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

AXES = ("step", "samples", "epoch", "time")
_MAX_MARKS = 200  # of one kind
_MAX_KNOTS = 400
_EVENT_VALUES = ("loss", "grad_norm", "zscore", "from_step", "rank", "host", "cause", "ratio", "share")


def thin(values: Floats, most: int) -> Rows:
    """Return the rows of a curve to keep, `most`, at least 10, or all: the lowest and the highest value of each of many equal parts.

    The first and the last row stay. Where there is a NaN between two rows that stay, the first and the last such NaN stay as well: no gap
    is drawn over, and every spike has its height.
    """
    count, is_nan = len(values), np.isnan(values)
    if count <= most:
        return np.arange(count)
    parts = max(1, (most - 4) // 6 if is_nan.any() else (most - 2) // 2)
    size = -(-count // parts)
    table = np.pad(values, (0, -count % size), constant_values=np.nan).reshape(-1, size)
    first = np.arange(len(table)) * size
    lowest, highest = np.where(np.isnan(table), np.inf, table).argmin(1), np.where(np.isnan(table), -np.inf, table).argmax(1)
    has_values = ~np.isnan(table).all(1)
    kept = np.unique(np.concatenate([[0, count - 1], (first + lowest)[has_values], (first + highest)[has_values]]))
    nans = np.flatnonzero(is_nan)
    begin, end = np.searchsorted(nans, kept[:-1], "right"), np.searchsorted(nans, kept[1:], "left")
    between = begin < end
    return np.unique(np.concatenate([kept, nans[begin[between]], nans[end[between] - 1]]))


def knots(column: Floats, tolerance: float) -> list[list[float]]:
    """Return few points, row and value, between which a column is linear within `tolerance`; at most `_MAX_KNOTS`."""
    kept, open_parts = {0, len(column) - 1}, [(0, len(column) - 1)]
    while open_parts and len(kept) < _MAX_KNOTS:
        begin, end = open_parts.pop(0)
        if end - begin < 2:
            continue
        line = np.linspace(column[begin], column[end], end - begin + 1)
        off = np.abs(line - column[begin : end + 1])
        if off.max() > tolerance:
            middle = begin + int(off.argmax())
            kept.add(middle)
            open_parts += [(begin, middle), (middle, end)]
    return [[row, round(float(column[row]), 4)] for row in sorted(kept)]


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Rows, Floats]]:
    """Return each number of some records: the records that have it, and its values; null, which stands for NaN or infinite, is NaN."""
    columns, every = {}, np.arange(len(records))
    for name in dict.fromkeys(name for keys in dict.fromkeys(map(tuple, records)) for name in keys if name != "split"):
        with suppress(ValueError, TypeError):  # no numbers: a text
            try:
                columns[name] = every, np.asarray([record[name] for record in records], dtype=np.float64)
            except KeyError:
                rows = [row for row, record in enumerate(records) if name in record]
                columns[name] = np.asarray(rows), np.asarray([records[row][name] for row in rows], dtype=np.float64)
    return columns


def curves_of(root: Path, *, points: int) -> dict[str, Any]:
    """Return what metrics.jsonl of a run folder says: its newest and best values, and its curves, thinned to `points` in all.

    For each split `axes` tells how a record's step, samples, epoch and time follow from its row.
    """
    run, splits = ArchivedRun(root), dict[str, list[dict[str, Any]]]()
    for record in run.metrics:
        splits.setdefault(record["split"], []).append(record)
    tables = {split: columns_of(records) for split, records in splits.items()}
    begin = min((float(columns["time"][1].min()) for columns in tables.values() if "time" in columns), default=0.0)
    curves, axes = dict[str, Any](), dict[str, Any]()
    most = max(100, points // max(1, sum(len(columns.keys() - set(AXES)) for columns in tables.values())))
    for split, columns in tables.items():
        axes[split] = {}
        for axis in AXES:
            if axis in columns and len(columns[axis][1]) == len(splits[split]) and np.isfinite(columns[axis][1]).all():
                values = columns[axis][1] - (begin if axis == "time" else 0.0)
                within = {"time": max(0.01, float(np.ptp(values)) / 1000), "epoch": 2e-4}.get(axis, 0.4)
                axes[split][axis] = knots(values, within)
        for name, (rows, values) in columns.items():
            if name not in AXES:
                kept = thin(values, most)
                curves[f"{split}/{name}"] = {"y": values[kept], "n": len(values), "nan": int(np.isnan(values).sum())}
                if len(kept) < len(splits[split]):
                    curves[f"{split}/{name}"]["rows"] = np.diff(rows[kept], prepend=0)
    return {"curves": curves, "axes": axes, "last": run.last, "best": run.best, "step": run.step}


def marks_of(run: ArchivedRun) -> list[dict[str, Any]]:
    """Return what happened to a run at which step: events, failures, attempts, checkpoints, and a stop."""
    marks: list[dict[str, Any]] = []
    for event in run.events:
        values = ", ".join(f"{name} {_short(event[name])}" for name in _EVENT_VALUES if event.get(name) is not None)
        if isinstance(ids := event.get("sample_ids"), list):
            values += f"; samples {', '.join(map(str, ids[:8]))}{' ...' if len(ids) > 8 else ''}"
        marks.append({"kind": str(event.get("kind") or event.get("event")), "step": event.get("step"), "text": values})
    for path in sorted(run.root.glob("failure*.json")):
        if (failure := load_report(path)) is not None:
            marks.append({"kind": "failure", "step": failure.step, "text": failure.line(200)})
    for number, attempt in enumerate(read_times(run.folder, most_ranks=0)[1:], 2):
        kind = "restart" if attempt.restart else "resume"
        marks.append({"kind": kind, "step": attempt.step, "text": f"attempt {number} goes on after step {attempt.step}"})
    marks += [{"kind": "checkpoint", "step": entry.step, "text": entry.path.name} for entry in run.checkpoints]
    if run.result is not None and run.result.status in (Status.PREEMPTED, Status.INTERRUPTED, Status.FAILED):
        marks.append(
            {"kind": "stop", "step": run.result.step, "text": f"{run.result.status}: {run.result.error or 'stopped in good order'}"}
        )
    seen: dict[str, int] = {}
    for mark in marks:
        seen[mark["kind"]] = seen.get(mark["kind"], 0) + 1
        mark["number"] = seen[mark["kind"]]
    return [mark for mark in marks if isinstance(mark["step"], int) and mark["number"] <= _MAX_MARKS]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
