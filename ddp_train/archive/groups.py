"""Runs grouped by all but the seed: how good is each setting, and is the best one certain? By Student's t, and Welch's for two groups."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

import numpy as np

from ddp_train.archive.index import COLUMNS
from ddp_train.config.tree import changes_results
from ddp_train.errors import plural
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS

CONFIDENCE = 0.95
_CUT = "debug.max_steps"  # a run that it cut off is not compared with whole ones, though it may go on as one of them


@dataclass(frozen=True, kw_only=True)
class Group:
    """Completed runs that differ by the seed alone, and the mean of their newest values."""

    metric: str
    goal: str
    settings: dict[str, Any]  # the keys by which the groups differ
    typed: str  # of these, what was typed
    folders: list[str]  # of the runs, the best first
    n: int
    mean: float
    deviation: float | None  # standard deviation of the sample; None: a single value says nothing of it
    half_width: float | None  # the true mean lies within mean ± this with `CONFIDENCE`


def grouped(rows: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the groups of completed rows, by their metrics, the best first."""
    members: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in sorted(filter(_has_value, rows), key=lambda row: row["started"] or 0):
        repeat = str([(name, row[name]) for name in sorted(row) if name.rpartition(".")[2] in REPEATS and changes_results(name)])
        members.setdefault((row["metric"], row["settings"], row.get(_CUT)), {})[repeat] = row  # of the same seed the newest counts
    first = [next(iter(group.values())) for group in members.values()]
    names = [name for name in dict.fromkeys(name for row in first for name in row) if name not in COLUMNS and _is_setting(name)]
    differing = [name for name in names if len({str(row.get(name)) for row in first}) > 1]
    groups = []
    for row, typed, group in zip(first, distinct_words(first, _is_setting), members.values(), strict=True):
        ranked = sorted(group.values(), key=lambda row: row["last"], reverse=row["goal"] == "max")
        values = [row["last"] for row in ranked]
        deviation = stdev(values) if len(values) > 1 else None
        groups.append(
            Group(
                metric=row["metric"],
                goal=row["goal"],
                settings={name: row.get(name) for name in differing},
                typed=typed,
                folders=[row["folder"] for row in ranked],
                n=len(values),
                mean=fmean(values),
                deviation=deviation,
                half_width=None if deviation is None else t_quantile(len(values) - 1) * deviation / math.sqrt(len(values)),
            )
        )
    return sorted(groups, key=lambda group: (group.metric, -group.mean if group.goal == "max" else group.mean))


def distinct_words(rows: Sequence[dict[str, Any]], counts: Callable[[str], bool]) -> list[str]:
    """Return the overrides of each row, as typed, without those that all rows have; `counts` tells which keys count."""
    words = [[word for word in shlex.split(row["typed"] or "") if counts(word.partition("=")[0].lstrip("+~"))] for row in rows]
    common = set(words[0]).intersection(*words) if len(words) > 1 else set()
    return [" ".join(word for word in typed if word not in common) for typed in words]


def remarks(rows: Sequence[dict[str, Any]], groups: Sequence[Group]) -> list[str]:
    """Say how many completed rows count in no group and why, and whether the best group is certainly better than the next one."""
    valued, completed = sum(map(_has_value, rows)), sum(row["status"] == Status.COMPLETED for row in rows)
    again = valued - sum(group.n for group in groups)
    said = [f"left out: {completed - valued} without a finite value of the metric"] if completed > valued else []
    said += [f"left out: {again} with the settings and the seed of a newer one"] if again else []
    if len(groups) < 2 or groups[0].metric != groups[1].metric:
        return said
    best, other = groups[:2]
    text, half_width = f"the best is better than the next by {abs(best.mean - other.mean):.3g}", welch(best, other)
    if half_width is None:
        return [*said, f"{text}; not certain: one run says nothing of the spread (more seeds: -m seed=0,1,2)"]
    why = f"not certain with {plural(best.n, 'run')} and {plural(other.n, 'run')}"
    if abs(best.mean - other.mean) > half_width:
        why = "certain, if these two were not picked from many"
    return [*said, f"{text} ± {half_width:.2g} ({CONFIDENCE:.0%} confidence): {why}"]


def welch(left: Group, right: Group) -> float | None:
    """Return the half width of the difference of two means with `CONFIDENCE`; None: one of them is a single value."""
    if left.deviation is None or right.deviation is None:
        return None
    a, b = left.deviation**2 / left.n, right.deviation**2 / right.n
    freedom = (a + b) ** 2 / (a**2 / (left.n - 1) + b**2 / (right.n - 1)) if a + b > 0 else 1.0  # Welch and Satterthwaite
    return t_quantile(freedom) * math.sqrt(a + b)


@cache
def t_quantile(freedom: float) -> float:
    """Return the value that Student's |t| exceeds with probability 1 - `CONFIDENCE`.

    With t = sqrt(freedom) tan(angle) the density is a power of the cosine, which is summed up to that probability.
    """
    angles = np.linspace(0, math.pi / 2, 200_001)
    below = np.cumsum(np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1))
    return float(math.sqrt(freedom) * np.tan(np.interp(CONFIDENCE * below[-1], below, angles[1:])))


def _has_value(row: dict[str, Any]) -> bool:
    return row["status"] == Status.COMPLETED and isinstance(row["last"], (int, float))


def _is_setting(key: str) -> bool:
    return key == _CUT or ("/" not in key and key.rpartition(".")[2] not in REPEATS and changes_results(key))
