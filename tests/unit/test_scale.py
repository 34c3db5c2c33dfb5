"""What grows with the number of ranks, and what must not: the simulation of docs/scale.md."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.benchmark.scale import machine_parts, network, rank_parts, store_parts


def most_threads() -> float:
    """Return how many threads this process may have, as far as anybody says."""
    most = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max", "/proc/sys/kernel/threads-max", "/proc/sys/vm/max_map_count"):
        with suppress(OSError, ValueError):  # it is not there, or says `max`
            most.append(int(Path(path).read_text()) // (4 if path.endswith("map_count") else 1))
    return min(number for number in (*most, 1 << 20) if number >= 0)


def test_512_machines_that_come_at_once_are_taken_in_at_once_and_start_again_when_one_is_lost() -> None:
    found = machine_parts.attempts_of(4096)
    assert (found.machines, found.code, found.tries) == (512, 0, 511)
    assert found.said_bytes < 10_000 * found.machines, found


def test_rank_0_asks_the_store_no_more_often_for_many_ranks() -> None:
    size = 4096 if most_threads() > 5000 else 256  # each rank is a thread
    for act, most in ((store_parts.meeting, 16), (store_parts.saving, 20), (store_parts.leaving, 8)):
        found = act(size)
        assert found.requests_of_main <= most + size // 1024, found
        assert found.most_of_others <= 10, found
        assert found.bytes < 1000 * size, found


def test_of_many_that_fail_together_one_asks() -> None:
    found = store_parts.failing(64)
    assert found.requests < 40 * 64, found  # 650 for each where each asked all


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's fake process group scatters nothing before")
def test_what_a_rank_of_4096_does_by_itself_takes_milliseconds() -> None:
    manifest, restored = rank_parts.restoring(4096)
    assert manifest < 1 << 20
    costs = [*rank_parts.comparing(4096), *restored, *rank_parts.seeking(4096), rank_parts.dividing(4096, "GPT 7B")]
    assert max(each.peak_mib for each in costs if each.rank) < 4
    assert max(each.peak_mib for each in costs) < 64


def test_a_tree_does_not_feel_the_number_of_nodes_as_a_ring_does() -> None:
    h100 = network.NETWORKS[0]
    ring, tree = (network.all_reduce_s(h100, 4 * 124e6, 16384, by=by) for by in ("ring", "tree"))
    assert tree < 0.01 < ring
    assert network.all_reduce_s(h100, 1e9, 8, by="ring") == pytest.approx(2 * 7 / 8 / 370 + 14 * 1.9e-6)
    assert network.scatter_or_gather_s(h100, 1e9, 512) * 2 == network.all_reduce_s(h100, 1e9, 512, by="ring")
