"""Collectives in one order on all ranks, for every run that tests/distributed starts; and that another order is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project
from tests.faults.in_order import differences, noting, taken_from

ROOT = Path(__file__).parents[2]

SWAPPED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
values = [torch.ones(2), torch.ones(2, dtype=torch.int32)]
for each in values if dist.get_rank() == 0 or "swap" not in sys.argv else reversed(values):
    dist.all_reduce(each)
dist.barrier()
os._exit(0)
"""


def call(name: str, size: int = 1, *, group: str = "0", dtype: str = "Float", at: int = 0) -> dict[str, Any]:
    sides = {"input_sizes": [[size]], "input_dtypes": [dtype], "output_sizes": [[size]], "output_dtypes": [dtype]}
    return {"process_group": [group, ""], "profiling_name": f"gloo:{name}", "time_created_ns": at, **sides}


def notes(*calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"group": ["run", "1"], "rank": rank, "calls": each} for rank, each in enumerate(calls)]


def test_the_first_collective_that_two_ranks_do_not_share_is_named() -> None:
    same = [call("broadcast"), call("all_reduce", 3)]
    assert differences(notes(same, same, same[:1])) == []  # one has ended earlier
    (found,) = differences(notes(same, same[::-1]))
    assert found.startswith("collective 1: rank 0 calls broadcast in group 0: [[1]] ['Float'] to")
    assert differences(notes(same, [call("broadcast"), call("all_reduce", 4)]))
    assert differences(notes(same, [call("broadcast"), call("all_reduce", 3, dtype="Int")]))


def test_groups_are_compared_with_each_other_where_two_ranks_are_in_both() -> None:
    in_turn = [call("all_reduce", group="0"), call("all_reduce", group="1")]
    assert len(differences(notes(in_turn, in_turn[::-1]))) == 1
    others = [call("all_reduce", group="2"), call("all_reduce", group="0")]
    assert differences(notes(in_turn, others)) == []  # of 1 and 2 each has one alone


def test_two_lives_at_one_place_are_not_compared_with_each_other() -> None:
    first, second = [call("broadcast", at=1)], [call("all_reduce", at=60 * 10**9)]
    assert differences([*notes(first, first), *notes(second, second)]) == []


@pytest.mark.long
@pytest.mark.parametrize("way", ["same", "swap"])
def test_another_order_that_gloo_accepts_is_found(project: Project, way: str) -> None:
    script, folder = project.write("script.py", SWAPPED), project.folder / "noted"
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), way]
    done = subprocess.run(command, env={**os.environ, **noting(folder)}, cwd=project.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = taken_from(folder)
    assert [len(each["calls"]) >= 2 for each in found] == [True, True]
    assert len(differences(found)) == (way == "swap")


@pytest.mark.long
@pytest.mark.parametrize("file", [path.name for path in sorted((ROOT / "tests/distributed").glob("test_*.py"))])
def test_the_runs_of_each_test_call_their_collectives_in_one_order(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", f"tests/distributed/{file}", "--collectives"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout[-5000:]  # a file with long tests alone
