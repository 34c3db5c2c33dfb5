"""One rank of 8 and of 64 in a process of its own: what it holds of weights whose rows do not divide, and what all hold together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest

from tests.unit.rig.ranks import WAYS

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[pytest.param(8, id="8"), pytest.param(64, id="64", marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> dict[str, Ranks]:
    """Give, for each way, what each rank says."""
    command = [sys.executable, "-m", "tests.unit.rig.ranks", str(request.param), *WAYS]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = defaultdict[str, Ranks](list)
    for line in done.stdout.splitlines():
        said = json.loads(line)
        found[said["way"]].append(said)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_rows_are_somewhere_and_none_is_twice(way: str, ranks: dict[str, Ranks]) -> None:
    """8, 10, 24 and 32 rows among 8 or 64 ranks, of which some have none; the optimizer keeps the state of its own rows alone."""
    shards = len(ranks[way]) // WAYS[way][1]
    found = [rank["kept"] for rank in ranks[way][:shards]]
    for name, (whole, *_) in found[0].items():
        rows = [state[0] for _, _, state in (kept[name] for kept in found)]
        most = -(-whole[0] // shards)
        assert sum(rows) == whole[0], name
        assert rows == [max(0, min(most, whole[0] - most * rank)) for rank in range(shards)], name
        for _, own, state in (kept[name] for kept in found):
            assert state[1:] == whole[1:], name
            assert own == (whole if way == "zero1" else state), name


@pytest.mark.parametrize("way", ["hsdp", "hsdp_of_single_ranks"])
def test_each_group_of_replicas_holds_the_same(way: str, ranks: dict[str, Ranks]) -> None:
    shards = len(ranks[way]) // WAYS[way][1]
    groups = [[rank["kept"] for rank in ranks[way][first : first + shards]] for first in range(0, len(ranks[way]), shards)]
    assert groups == [groups[0]] * WAYS[way][1]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_rows_takes_its_part_in_each_collective(way: str, ranks: dict[str, Ranks]) -> None:
    """What ranks call, in order, with sizes and types, is the same for all. Others would wait for ever."""
    calls = [rank["calls"] for rank in ranks[way]]
    assert calls[0]
    assert calls == [calls[0]] * len(calls)
