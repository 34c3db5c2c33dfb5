"""Runs grouped by all but the seed: how good is each setting, and is the best one certain? By Student's t, and Welch's for two groups."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from ddp_train.config.tree import changes_results
from ddp_train.errors import plural
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS

CONFIDENCE = 0.95
_CUT = "debug.max_steps"  # a run that it cut off is not compared with whole ones, though it may go on as one of them


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The mean of some values, and how far they lie from it; None: a single value says nothing of that."""

    n: int
    mean: float
    deviation: float | None  # standard deviation of the sample
    half_width: float | None  # the true mean lies within mean ± this with `CONFIDENCE`


@dataclass(frozen=True, kw_only=True)
class Group:
    """Completed runs that differ by the seed alone."""

    metric: str
    goal: str
    settings: dict[str, Any]  # the keys by which the groups differ
    typed: str  # of these, what was typed
    folders: list[str]  # of the runs, the best first
    spread: Spread  # of the newest values

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "spread": asdict(self.spread)}


def grouped(rows: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the groups of completed rows, by their metrics, the best first."""
    repeats: dict[tuple[str, str, str, str], dict[str, dict[str, Any]]] = {}
    for row in sorted(filter(_has_value, rows), key=lambda row: row["started"] or 0, reverse=True):
        content = json.loads(row["values"])
        repeat = {name: value for name, value in content.items() if name.rpartition(".")[2] in REPEATS and changes_results(name)}
        group = (row["metric"], row["goal"], row["settings"], str(content.get(_CUT)))
        repeats.setdefault(group, {}).setdefault(str(repeat), row)  # once more with the same seed is no second sample: the newest counts
    members = {key: [*group.values()] for key, group in repeats.items()}
    values = {key: json.loads(group[0]["values"]) for key, group in members.items()}
    words = {
        key: [word for word in shlex.split(group[0]["typed"]) if _is_setting(word.partition("=")[0].lstrip("+~"))]
        for key, group in members.items()
    }
    names = {name for settings in values.values() for name in settings if "/" not in name and _is_setting(name)}
    differing = [name for name in sorted(names) if len({str(settings.get(name)) for settings in values.values()}) > 1]
    groups = [
        Group(
            metric=key[0],
            goal=key[1],
            settings={name: values[key].get(name) for name in differing},
            typed=" ".join(word for word in words[key] if any(word not in others for others in words.values())),
            folders=[row["folder"] for row in sorted(group, key=lambda row: row["last"], reverse=key[1] == "max")],
            spread=spread_of([row["last"] for row in group]),
        )
        for key, group in members.items()
    ]
    return sorted(groups, key=lambda group: (group.metric, -group.spread.mean if group.goal == "max" else group.spread.mean))


def left_out(rows: Sequence[dict[str, Any]], groups: Sequence[Group]) -> str:
    """Say how many completed rows count in no group, and why; "": all do."""
    valued = sum(map(_has_value, rows))
    without = sum(row["status"] == Status.COMPLETED for row in rows) - valued
    again = valued - sum(group.spread.n for group in groups)
    why = [f"{without} without a finite value of the metric"] if without else []
    why += [f"{again} with the settings and the seed of a newer one"] if again else []
    return f"left out: {', '.join(why)}" if why else ""


def _has_value(row: dict[str, Any]) -> bool:
    return row["status"] == Status.COMPLETED and isinstance(row["last"], (int, float)) and math.isfinite(row["last"])


def _is_setting(key: str) -> bool:
    return key == _CUT or (key.rpartition(".")[2] not in REPEATS and changes_results(key))


def conclusion(groups: Sequence[Group]) -> str:
    """Say whether the best group is certainly better than the next one of the same metric; "": there are no two."""
    if len(groups) < 2 or groups[0].metric != groups[1].metric:
        return ""
    margin, half_width = difference(groups[0].spread, groups[1].spread)
    by = f"the best is better than the next by {abs(margin):.3g}"
    if half_width is None:
        return f"{by}; not certain: one run says nothing of the spread (more seeds: -m seed=0,1,2)"
    within = f"{by} ± {half_width:.2g} ({CONFIDENCE:.0%} confidence)"
    if abs(margin) > half_width:
        return f"{within}: certain, if these two were not picked from many"
    return f"{within}: not certain with {plural(groups[0].spread.n, 'run')} and {plural(groups[1].spread.n, 'run')}"


def spread_of(values: Sequence[float]) -> Spread:
    """Return the mean and the spread of one or more values."""
    n, deviation = len(values), stdev(values) if len(values) > 1 else None
    half_width = None if deviation is None else t_quantile(n - 1) * deviation / math.sqrt(n)
    return Spread(n=n, mean=fmean(values), deviation=deviation, half_width=half_width)


def difference(left: Spread, right: Spread) -> tuple[float, float | None]:
    """Return left - right of two means, and its half width with `CONFIDENCE`; None: one of them is a single value."""
    if left.deviation is None or right.deviation is None:
        return left.mean - right.mean, None
    a, b = left.deviation**2 / left.n, right.deviation**2 / right.n
    freedom = (a + b) ** 2 / (a**2 / (left.n - 1) + b**2 / (right.n - 1)) if a + b > 0 else 1.0  # Welch and Satterthwaite
    return left.mean - right.mean, t_quantile(freedom) * math.sqrt(a + b)


def t_quantile(freedom: float) -> float:
    """Return the value that Student's |t| exceeds with probability 1 - `CONFIDENCE`.

    With t = sqrt(freedom) tan(angle) the density is a cosine's power, which Simpson's rule integrates; Newton's method finds the angle.
    """
    scale, steps = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi), 200
    angle = math.atan(2 / math.sqrt(freedom))
    for _ in range(30):
        inner = sum((4 if i % 2 else 2) * math.cos(angle * i / steps) ** (freedom - 1) for i in range(1, steps))
        end = math.cos(angle) ** (freedom - 1)
        move = (scale * angle / (3 * steps) * (1 + inner + end) - CONFIDENCE / 2) / (scale * end)
        angle = min(max(angle - move, angle / 2), (angle + math.pi / 2) / 2)
    return math.sqrt(freedom) * math.tan(angle)
