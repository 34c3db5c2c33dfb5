"""A run's steps for a page: curves, thinned without losing a spike or a NaN, marks of what happened when, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.run_folder.failure import load_report
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.times import AttemptTimes, goodput_of
from ddp_train.system.phase import Part

Floats = NDArray[np.float64]

AXES = ("step", "samples", "epoch", "time")
_MAX_AXIS = 400  # points of an axis
_MAX_EVENTS = 300  # as marks
_MAX_COLUMNS, _MAX_RANKS = 100, 64  # of the time split
_EVENT_VALUES = ("loss", "grad_norm", "zscore", "from_step")


def thin(values: Floats, most: int) -> NDArray[np.int64]:
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


def curves_of(run: ArchivedRun, *, points: int) -> dict[str, Any]:
    """Return the curves in metrics.jsonl, thinned to `points` in all, and for each split how samples, epoch and time follow from the step.

    A value that is null, which stands for NaN or infinite, is NaN. Raises ValueError, TypeError: an axis has something else.
    """
    splits, tables, axes = dict[str, list[dict[str, Any]]](), dict[str, Floats](), dict[str, Any]()
    for record in run.metrics:
        splits.setdefault(record["split"], []).append(record)
    for split, records in splits.items():
        for name in dict.fromkeys(chain.from_iterable(records)):
            with suppress(ValueError, TypeError):  # a text
                if name not in AXES:
                    pairs = [(record["step"], record[name]) for record in records if name in record]
                    tables[f"{split}/{name}"] = np.array(pairs, dtype=np.float64)
        some = [records[row] for row in np.unique(np.linspace(0, len(records) - 1, _MAX_AXIS).astype(int))]
        columns = {axis: np.array([record.get(axis) for record in some], dtype=np.float64) for axis in AXES}
        columns["time"] -= run.metrics[0].get("time") or 0.0
        axes[split] = {axis: column for axis, column in columns.items() if np.isfinite(column).all()}
    curves, most = dict[str, Any](), max(100, points // max(1, len(tables)))
    for name, table in tables.items():
        steps, values = table[thin(table[:, 1], most)].T
        curves[name] = {"steps": np.diff(steps, prepend=0), "y": values, "n": len(table)}
    return {"curves": curves, "axes": axes}


def marks_of(run: ArchivedRun, attempts: Sequence[AttemptTimes]) -> list[dict[str, Any]]:
    """Return the marks of a run by step: events, failures, attempts, checkpoints, and a stop."""
    marks = list[tuple[str, Any, str]]()
    for event in run.events[:_MAX_EVENTS]:
        facts = {name: event[name] for name in _EVENT_VALUES if event.get(name) is not None}
        values = [f"{name} {fact:.6g}" if isinstance(fact, float) else f"{name} {fact}" for name, fact in facts.items()]
        values += [str(event["text"])] if "text" in event else []
        if isinstance(ids := event.get("sample_ids"), list):
            values.append(f"samples {', '.join(map(str, ids[:8]))}{' ...' if len(ids) > 8 else ''}")
        marks.append((str(event.get("kind") or event.get("event")), event.get("step"), ", ".join(values)))
    failures = (load_report(path) for path in sorted(run.root.glob("failure*.json")))
    marks += [("failure", failure.step, failure.line(200)) for failure in failures if failure is not None]
    for number, attempt in enumerate(attempts[1:], 2):
        kind = "restart" if attempt.restart else "resume"
        marks.append((kind, attempt.step, f"attempt {number} goes on after step {attempt.step}"))
    marks += [("checkpoint", entry.step, entry.path.name) for entry in run.checkpoints]
    if run.result is not None and run.result.status in (Status.PREEMPTED, Status.INTERRUPTED, Status.FAILED):
        marks.append(("stop", run.result.step, f"{run.result.status}: {run.result.error or 'stopped in good order'}"))
    return [{"kind": kind, "step": step, "text": text} for kind, step, text in marks if isinstance(step, int)]


def time_split_of(attempts: Sequence[AttemptTimes], *, cells: int) -> dict[str, Any] | None:
    """Return the parts of a run's time, neighbours summed to at most `cells` values, columns x ranks x parts; None: it measured none."""
    goodput, spans = goodput_of(attempts), [span for attempt in attempts for span in attempt.spans if span.ranks]
    if goodput is None or not spans:
        return None
    ranks = min(len(span.ranks) for span in spans)  # an attempt may have another number of them
    shown = np.unique(np.linspace(0, ranks - 1, min(ranks, _MAX_RANKS)).astype(int))
    columns = int(np.clip(cells // (len(Part) * len(shown)), 8, _MAX_COLUMNS))
    first = np.unique(np.linspace(0, len(spans), min(columns, len(spans)) + 1).astype(int))[:-1]
    table = np.array([span.ranks[:ranks] for span in spans], dtype=np.float64)[:, shown]
    never = {part: "" for number, part in enumerate(Part) if np.isnan(table[:, :, number]).all()}
    return {
        "parts": [*Part],
        "not_split": {**never, **attempts[-1].not_split},
        "hosts": attempts[-1].hosts,
        "ranks": shown.tolist(),
        "steps": [spans[row].step for row in [*(first[1:] - 1), -1]],
        "taken": np.add.reduceat([span.steps for span in spans], first).tolist(),
        "seconds": np.add.reduceat(np.nan_to_num(table), first),  # columns x ranks x parts
        "goodput": goodput,
    }
