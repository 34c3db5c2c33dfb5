"""Runs grouped by all but the seed: how good is each setting, and is the best one certain? By Student's t, and Welch's for two groups."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
class RunGroup:
    """Completed runs that differ by the seed alone, and the mean of their newest values."""

    metric: str
    goal: str
    settings: dict[str, Any]  # the keys by which the groups differ
    label: str  # what tells it from all others
    folders: list[str]  # of the runs that count, the best first
    n: int
    mean: float
    deviation: float | None  # standard deviation of the sample; None: a single value says nothing of it
    half_width: float | None  # the true mean lies within mean ± this with `CONFIDENCE`


def grouped(rows: Sequence[dict[str, Any]]) -> list[RunGroup]:
    """Return the groups of completed rows, by their metrics, the best first. Of the same seed the newest ordinary run counts."""
    members: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in sorted(filter(_has_value, rows), key=lambda row: (_is_ordinary(row), row["started"] or 0)):
        repeat = str([(name, row[name]) for name in sorted(row) if is_repeat(name) and changes_results(name)])
        members.setdefault((row["metric"], *settings_of(row)), {})[repeat] = row
    first = [next(iter(group.values())) for group in members.values()]
    differing, groups = telling_keys(first, []), list[RunGroup]()
    for row, label, group in zip(first, labels(first), members.values(), strict=True):
        ranked = sorted(group.values(), key=lambda row: row["last"], reverse=row["goal"] == "max")
        values = [row["last"] for row in ranked]
        deviation = stdev(values) if len(values) > 1 else None
        groups.append(
            RunGroup(
                metric=row["metric"],
                goal=row["goal"],
                settings={name: row.get(name) for name in differing},
                label=label,
                folders=[row["folder"] for row in ranked],
                n=len(values),
                mean=fmean(values),
                deviation=deviation,
                half_width=None if deviation is None else t_quantile(len(values) - 1) * deviation / math.sqrt(len(values)),
            )
        )
    return sorted(groups, key=lambda group: (group.metric, -group.mean if group.goal == "max" else group.mean))


def settings_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of a run's group: runs with the same settings are one group."""
    return row["settings"], row.get(_CUT)


def labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings that tell each row from all others: the typed ones, and for rows with the same ones the keys that differ."""
    found, same = distinct_words(rows, _is_setting), dict[str, list[int]]()
    for i, label in enumerate(found):
        same.setdefault(label, []).append(i)
    for label, clash in same.items():
        some = [rows[i] for i in clash]
        more = distinct_words(some, lambda key: not is_repeat(key) and key != "name")
        for name in telling_keys(some, []):
            longer = [f"{text} {name}={row.get(name)}" for text, row in zip(more, some, strict=True)]
            more = longer if len(set(longer)) > len(set(more)) else more
        for i, text in zip(clash, more, strict=True):
            found[i] = f"{label} {text}".strip() if len(clash) > 1 else label
    return found


def telling_keys(rows: Sequence[Mapping[str, Any]], typed: Sequence[str], *, most: int = 0) -> list[str]:
    """Return the keys in which rows differ, the most telling first.

    These are all that were typed, and of a choice (`model=mlp`) the first key below it; then, if `most` is 0 up to that many keys in all,
    those that differ in most rows, and last those that follow from what was typed.
    """
    columns = {name: [str(row.get(name)) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    columns = {name: column for name, column in columns.items() if len(set(column)) > 1 and name not in COLUMNS and "/" not in name}
    chosen = {next((name for name in columns if name == key or name.startswith(f"{key}.")), "") for key in typed}
    known = [*zip(*(columns[name] for name in columns if name in chosen and not is_repeat(name)), strict=True)] or [()] * len(rows)

    def rank(name: str) -> tuple[bool, bool, int]:
        follows = len({*zip(known, columns[name], strict=True)}) == len({*known})
        return name not in chosen, name not in chosen and follows, Counter(columns[name]).most_common(1)[0][1]

    found = sorted((name for name in columns if name in chosen or _is_setting(name)), key=rank)
    return found[: max(most, len(chosen & columns.keys()))] if most else found


def distinct_words(rows: Sequence[dict[str, Any]], counts: Callable[[str], bool]) -> list[str]:
    """Return the overrides of each row, as typed, without those that all rows have; `counts` tells which keys count."""
    words = [[word for word in shlex.split(row["typed"] or "") if counts(key_of(word))] for row in rows]
    common = set(words[0]).intersection(*words) if len(words) > 1 else set()
    return [" ".join(word for word in typed if word not in common) for typed in words]


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def remarks(rows: Sequence[dict[str, Any]], groups: Sequence[RunGroup]) -> list[str]:
    """Say which completed rows count in no group and why, and whether the best group is certainly better than the next one."""
    valued, completed = sum(map(_has_value, rows)), sum(row["status"] == Status.COMPLETED for row in rows)
    said = [f"left out: {completed - valued} without a finite value of the metric"] if completed > valued else []
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


def welch(left: RunGroup, right: RunGroup) -> float | None:
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


def _is_ordinary(row: Mapping[str, Any]) -> bool:
    """Tell whether a run is for its own results: it debugged nothing, and did not reproduce another one."""
    return not row["reproduces"] and not any(row[name] for name in row if name.startswith("debug."))


def is_repeat(key: str) -> bool:
    """Tell whether a key only repeats a run, with the same settings."""
    return key.rpartition(".")[2] in REPEATS


def _is_setting(key: str) -> bool:
    return key == _CUT or (not is_repeat(key) and changes_results(key))
