"""Where a run's time went, for a page: its parts by step, and by rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.packed import Numbers
from ddp_train.run_folder.times import PARTS, goodput_of, read_times

_MAX_COLUMNS = 100
_MAX_RANKS = 64


def time_split_of(run: ArchivedRun, numbers: Numbers, *, cells: int) -> dict[str, Any] | None:
    """Return the parts of a run's time, thinned by summing neighbouring records; None: it measured none.

    `cells`: the largest number of values: parts x ranks x columns.
    """
    attempts = read_times(run.folder)
    goodput, spans = goodput_of(attempts), [span for attempt in attempts for span in attempt.spans if span.ranks]
    if goodput is None or not spans:
        return None
    ranks = min(len(span.ranks) for span in spans)  # an attempt may have another number of them
    table = np.array([span.ranks[:ranks] for span in spans], dtype=np.float64)
    not_split = {part: "" for number, part in enumerate(PARTS) if np.isnan(table[:, :, number]).all()}
    table = np.nan_to_num(table)
    shown = np.unique(np.linspace(0, ranks - 1, min(ranks, _MAX_RANKS)).round().astype(int))
    columns = int(np.clip(cells // (len(PARTS) * len(shown)), 8, _MAX_COLUMNS))
    bounds = np.unique(np.linspace(0, len(spans), min(columns, len(spans)) + 1).astype(int))[:-1]
    return {
        "parts": PARTS,
        "not_split": {**not_split, **attempts[-1].not_split},
        "hosts": attempts[-1].hosts,
        "ranks": shown.tolist(),
        "steps": [spans[row].step for row in [*(bounds[1:] - 1), len(spans) - 1]],
        "taken": np.add.reduceat([span.steps for span in spans], bounds).tolist(),
        "mean": numbers.add(np.add.reduceat(table.mean(1), bounds)),  # columns x parts
        "by_rank": numbers.add(np.add.reduceat(table[:, shown], bounds)),  # columns x ranks x parts
        "sum": table.mean(1).sum(0).round(3).tolist(),
        "goodput": goodput,
    }
