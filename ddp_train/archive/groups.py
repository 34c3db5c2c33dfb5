"""Runs grouped by all but the seed: how good is each setting, and is the best one certain?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_train.archive.statistics import CONFIDENCE, Spread, difference, spread_of
from ddp_train.config.tree import changes_results
from ddp_train.errors import plural
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS


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
    members: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == Status.COMPLETED and isinstance(row["last"], (int, float)):
            members.setdefault((row["metric"], row["goal"], row["settings"]), []).append(row)
    values = {key: json.loads(group[0]["values"]) for key, group in members.items()}
    words = {key: [word for word in shlex.split(group[0]["typed"]) if _is_setting(word)] for key, group in members.items()}
    names = {name for settings in values.values() for name in settings if "/" not in name and changes_results(name)}
    differing = [name for name in sorted(names) if len({str(settings.get(name)) for settings in values.values()}) > 1]
    groups = [
        Group(
            metric=key[0],
            goal=key[1],
            settings={name: values[key].get(name) for name in differing if name.rpartition(".")[2] not in REPEATS},
            typed=" ".join(word for word in words[key] if any(word not in others for others in words.values())),
            folders=[row["folder"] for row in sorted(group, key=lambda row: row["last"], reverse=key[1] == "max")],
            spread=spread_of([row["last"] for row in group]),
        )
        for key, group in members.items()
    ]
    return sorted(groups, key=lambda group: (group.metric, -group.spread.mean if group.goal == "max" else group.spread.mean))


def _is_setting(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+~")
    return key.rpartition(".")[2] not in REPEATS and changes_results(key)


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
