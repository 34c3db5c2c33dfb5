"""Whether all ranks have called the same collectives in one order, with the same sizes and types: else they hang or compute nonsense.

gloo goes on where two of the same kind are called the other way around; NCCL waits for ever. `pytest --collectives` compares after each
test what the processes of its runs have noted (`noting/sitecustomize.py`). TORCH_DISTRIBUTED_DEBUG=DETAIL would do so while they run, but
ends DDP over gloo with a segmentation fault (torch 2.13).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

_NOTING = Path(__file__).with_name("noting")
_NEAR_NS = 5_000_000_000  # the first collective of a group waits for all its ranks
_ONE_SIDED = {"gather": ("input",), "scatter": ("output",)}  # one rank alone has the other side
_BOTH = ("input", "output")


def noting(folder: Path) -> dict[str, str]:
    """Return the environment in which processes note their collectives in a folder."""
    path = os.pathsep.join(filter(None, (str(_NOTING), os.environ.get("PYTHONPATH", ""))))
    return {"COLLECTIVES_NOTED_IN": str(folder), "TORCH_FR_BUFFER_SIZE": "200000", "PYTHONPATH": path}


def taken_from(folder: Path) -> list[dict[str, Any]]:
    """Return what was noted since the last time, and forget it."""
    found = []
    for file in sorted(folder.glob("*.json")):
        found.append(json.loads(file.read_text()))
        file.unlink()
    return found


def differences(notes: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each two ranks of a group the first collective that they do not share; a rank that has ended earlier has called fewer.

    Args:
        notes: of processes, each with `group`, `rank` and `calls`.
    """
    return [line for group in _groups(notes) for one, other in _pairs(group) if (line := _difference(one, other))]


def _groups(notes: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the processes that were one group: of several lives at one place those that began together."""
    places: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for note in notes:
        places[json.dumps(note["group"])].append(note)
    for each in places.values():
        group: list[dict[str, Any]] = []
        for note in sorted(each, key=_began):
            if group and (_began(note) - _began(group[0]) > _NEAR_NS or note["rank"] in {known["rank"] for known in group}):
                yield group
                group = []
            group.append(note)
        yield group


def _pairs(group: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for place, one in enumerate(group):
        yield from ((one, other) for other in group[place + 1 :])


def _began(note: dict[str, Any]) -> int:
    return int(note["calls"][0]["time_created_ns"])


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Compare what two ranks have called in the groups of which both are, in the order over all of these."""
    shared = {call["process_group"][0] for call in one["calls"]} & {call["process_group"][0] for call in other["calls"]}
    said = [[_said(call) for call in each["calls"] if call["process_group"][0] in shared] for each in (one, other)]
    for number, (mine, theirs) in enumerate(zip_longest(*said), start=1):
        if mine is None or theirs is None:
            return ""
        if mine != theirs:
            return f"collective {number}: rank {one['rank']} calls {mine}, rank {other['rank']} {theirs}; {one['group'][0]}"
    return ""


def _said(call: dict[str, Any]) -> str:
    name = call["profiling_name"].partition(":")[2]
    sides = [f"{call[f'{side}_sizes']} {call[f'{side}_dtypes']}" for side in _ONE_SIDED.get(name, _BOTH)]
    return f"{name} in group {call['process_group'][0]}: {' to '.join(sides)}"
