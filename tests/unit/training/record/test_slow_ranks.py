"""Which rank is slow and why, from what each record brings; no rank of a noisy machine is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ddp_train.system.phase import Part
from ddp_train.training.record.slow_ranks import LOOKS, LOOKS_TO_END, PAUSE_LOOKS, Finding, SlowRanks, Table, far_machines


def rows(own: Mapping[int, tuple[float, float]], ranks: int = 4) -> Table:
    """Return rows of a look of synchronous steps: each rank's data and compute (by default 0.1 and 0.9), and it waits for the slowest."""
    table = np.zeros((ranks, len(Part)))
    times = [own.get(rank, (0.1, 0.9)) for rank in range(ranks)]
    for row, (data, compute) in zip(table, times, strict=True):
        row[[DATA, FORWARD, BACKWARD, COMMUNICATION]] = data, compute / 3, 2 * compute / 3, max(map(sum, times)) - data - compute + 0.01
    return 3 * table


DATA, FORWARD, BACKWARD, COMMUNICATION = map([*Part].index, (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.COMMUNICATION))  # columns


class Looks:
    """Ranks that are looked at again and again."""

    def __init__(self, ranks: int = 4, **settings: Any) -> None:
        self.judge = SlowRanks([f"node{rank // 2}" for rank in range(ranks)], 0, **settings)
        self.totals, self.step = np.zeros((ranks, len(Part))), 0

    def look(self, table: Table, steps: int = 30, ways: Mapping[int, float] = {}) -> list[Finding]:
        self.totals, self.step = self.totals + table, self.step + steps
        return [*self.judge.look(self.totals, self.step, ways)]


@pytest.mark.parametrize(("own", "cause"), [((0.9, 0.9), "data"), ((0.1, 1.7), "compute")])
@pytest.mark.parametrize("ranks", [2, 3, 4, 100])
def test_the_slow_rank_is_named_once_with_its_cause_and_once_more_when_that_is_over(
    own: tuple[float, float], cause: str, ranks: int
) -> None:
    looks = Looks(ranks)
    found = [looks.look(rows({1: own}, ranks)) for _ in range(6)]
    assert [len(events) for events in found] == [0] * (LOOKS - 1) + [1] + [0] * (6 - LOOKS)
    [event] = found[LOOKS - 1]
    assert (event["kind"], event["rank"], event["host"], event["cause"], event["others"]) == ("slow_rank", 1, "node0", cause, 0)
    assert event["ratio"] == pytest.approx(1.8) and event["text"].startswith(
        f"rank 1 on node0 by its {cause}: its own time in a step is 1.8"
    )
    over = [event["text"] for _ in range(LOOKS_TO_END) for event in looks.look(rows({}, ranks))]
    assert over == ["rank 1 on node0 is as fast as the others again"]


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    looks = Looks()
    assert not any(looks.look(rows({1: (0.1, 1.7)} if look % LOOKS else {})) for look in range(30))


def test_short_records_are_taken_together() -> None:
    looks = Looks()
    found = [looks.look(rows({1: (0.1, 1.7)}) / 60, 1) for _ in range(120)]  # 0.1 s each
    assert sum(map(len, found)) == 1 and found.index(next(filter(None, found))) > 30


def test_small_differences_and_noise_name_no_rank() -> None:
    looks, noise = Looks(2), random.Random(1)
    for _ in range(500):
        assert not looks.look(rows({0: (0.1, 1.1)}, 2))  # a fifth more
        assert not looks.look(rows({rank: (0.1, 0.9 * noise.uniform(0.85, 1.25)) for rank in range(2)}, 2), 3)
    assert not any(looks.look(rows({1: (0.1, 1.7)}, 2), 30_000) for _ in range(9))  # 0.1 ms a step: the host's own work of rank 0, say


def test_where_waiting_is_not_split_a_rank_is_still_found_slow_by_its_data() -> None:
    looks, hidden = Looks(is_split=False), rows({2: (0.9, 0.9)})
    hidden[:, FORWARD] += hidden[:, COMMUNICATION]
    hidden[:, COMMUNICATION] = 0.0
    [event] = [event for _ in range(LOOKS) for event in looks.look(hidden)]
    assert (event["rank"], event["cause"], event["ratio"]) == (2, "data", pytest.approx(1.8, abs=0.05))


def test_several_ranks_of_one_machine_are_one_message() -> None:
    looks = Looks(8)
    [event] = [event for _ in range(LOOKS) for event in looks.look(rows({1: (0.1, 1.7), 2: (0.1, 1.9)}, 8))]
    assert (event["rank"], event["ratio"], event["others"]) == (2, pytest.approx(2.0), 1)
    assert event["text"].startswith("rank 2 on node1 (and 1 more ranks) by its compute: ")


def test_all_ranks_waiting_for_their_data_is_said_once() -> None:
    looks = Looks()
    [event] = [event for _ in range(10) for event in looks.look(rows(dict.fromkeys(range(4), (0.4, 0.6))))]
    assert event["kind"] == "waits_for_data" and event["share"] == pytest.approx(0.4, abs=0.01) and event["text"].startswith("40% of each")


def test_the_network_is_measured_where_all_wait_and_for_no_rank() -> None:
    looks, waiting = Looks(), rows({})
    waiting[:, COMMUNICATION] += 1.5
    near, far = {0: 0.0001, 2: 0.001}, {0: 0.0001, 2: 0.04}
    found, measured = [], []
    for look in range(2 * PAUSE_LOOKS):  # the result is there some looks later
        ways = {} if look % PAUSE_LOOKS < LOOKS + 3 else near if look < PAUSE_LOOKS else far
        found += [(look, event["kind"], event["rank"]) for event in looks.look(waiting, 30, ways)]
        measured += [look] if looks.judge.measures_round_trips else []
    assert measured == [LOOKS - 1, LOOKS - 1 + PAUSE_LOOKS]
    assert found == [(PAUSE_LOOKS + LOOKS + 3, "slow_rank", 0), (PAUSE_LOOKS + LOOKS + 3, "slow_rank", 2)]  # the way between two
    over = [(event["kind"], event["rank"]) for _ in range(LOOKS_TO_END) for event in looks.look(rows({}))]
    assert over == [("slow_rank_over", 0), ("slow_rank_over", 2)]
    slow = Looks()
    for _ in range(10):
        slow.look(rows({1: (0.1, 1.7)}))
        assert not slow.judge.measures_round_trips


@pytest.mark.parametrize(
    ("seconds", "far"),
    [
        ({0: 0.0002, 2: 0.0005, 4: 0.0007}, {}),
        ({0: 0.0002, 2: 0.0005, 4: 0.04}, {4: "40 ms to rank 0 and back"}),
        ({0: 0.0002, 2: 0.04, 4: 0.041}, {0: "far from all others"}),  # the one that all others are measured from
        ({0: 0.0002, 2: 0.04}, {0: "far from all others", 2: "40 ms to rank 0 and back"}),  # two: it is the way between them
        ({0: 0.0002, 2: 0.0005, 4: 0.004}, {}),  # eight times, but nothing
        ({0: 0.0002}, {}),
    ],
)
def test_the_machine_with_a_slow_network_is_found(seconds: dict[int, float], far: dict[int, str]) -> None:
    assert far_machines(seconds) == far
