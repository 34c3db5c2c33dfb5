"""Which rank is slow and why, from what each record brings; no rank of a noisy machine is."""

from __future__ import annotations

import random

import pytest

from ddp_train.run_folder.times import BACKWARD, COMMUNICATION, DATA, FORWARD, OTHER, PARTS
from ddp_train.training.record.slow_ranks import LOOKS, Slow, SlowRanks, Ways, far_machines


def rows(own: dict[int, tuple[float, float]], ranks: int = 4, step: float = 1.0) -> list[list[float]]:
    """Return rows of a look of synchronous steps: each rank's data and compute (by default 0.1 and 0.9), and it waits for the slowest."""
    parts = []
    times = [own.get(rank, (0.1 * step, 0.9 * step)) for rank in range(ranks)]
    slowest = max(map(sum, times))
    for data, compute in times:
        row = [0.0] * len(PARTS)
        row[DATA], row[FORWARD], row[BACKWARD], row[COMMUNICATION] = data, compute / 3, 2 * compute / 3, slowest - data - compute + 0.01
        parts.append([3 * each for each in row])
    return parts


@pytest.mark.parametrize(("own", "cause"), [((0.9, 0.9), "data"), ((0.1, 1.7), "compute")])
@pytest.mark.parametrize("ranks", [2, 3, 4, 100])
def test_the_slow_rank_is_named_once_with_its_cause_and_once_more_when_that_is_over(
    own: tuple[float, float], cause: str, ranks: int
) -> None:
    judge = SlowRanks()
    found = [judge.look(rows({1: own}, ranks), 30) for _ in range(6)]
    assert [each is not None for each in found] == [False] * (LOOKS - 1) + [True] + [False] * (6 - LOOKS)
    assert found[LOOKS - 1] == Slow(1, cause, pytest.approx(1.8))
    assert judge.recovered() == []
    over = []
    for _ in range(5):
        assert judge.look(rows({}, ranks), 30) is None
        over += judge.recovered()
    assert over == [1]


def test_a_rank_that_spends_its_time_in_callbacks_and_records_is_slow_by_other() -> None:
    judge, found = SlowRanks(), list[Slow | None]()
    for _ in range(LOOKS):
        look = rows({0: (0.1, 1.7)})
        look[0][OTHER], look[0][FORWARD], look[0][BACKWARD] = 3 * 0.8, 3 * 0.3, 3 * 0.6
        found.append(judge.look(look, 30))
    assert found[-1] == Slow(0, "other", pytest.approx(1.8))


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    judge = SlowRanks()
    assert not any(judge.look(rows({1: (0.1, 1.7)} if look % LOOKS else {}), 30) for look in range(30))


def test_short_records_are_taken_together() -> None:
    judge = SlowRanks()
    found = [judge.look([[part / 60 for part in row] for row in rows({1: (0.1, 1.7)})], 1) for _ in range(120)]  # 0.1 s each
    assert sum(each is not None for each in found) == 1 and found.index(next(filter(None, found))) > 30


def test_small_differences_and_noise_name_no_rank() -> None:
    judge, noise = SlowRanks(), random.Random(1)
    for _ in range(500):
        assert judge.look(rows({0: (0.1, 1.1)}, 2), 30) is None  # a fifth more
        jitter = {rank: (0.1, 0.9 * noise.uniform(0.85, 1.25)) for rank in range(2)}
        assert judge.look(rows(jitter, 2), 3) is None
    assert judge.look(rows({1: (0.1, 1.7)}), 30_000) is None  # 0.1 ms a step: the host's own work of rank 0, say
    assert not judge.named


def test_where_waiting_is_not_split_a_rank_is_still_found_slow_by_its_data() -> None:
    judge, found = SlowRanks(is_split=False), []
    for _ in range(LOOKS):
        hidden = rows({2: (0.9, 0.9)})
        for row in hidden:
            row[FORWARD], row[COMMUNICATION] = row[FORWARD] + row[COMMUNICATION], 0.0
        found.append(judge.look(hidden, 30))
    assert found[-1] == Slow(2, "data", pytest.approx(1.8, abs=0.05))


def test_several_ranks_of_one_machine_are_one_message() -> None:
    judge = SlowRanks()
    found = [judge.look(rows({1: (0.1, 1.7), 2: (0.1, 1.9)}, 8), 30) for _ in range(LOOKS)]
    assert found[-1] == Slow(2, "compute", pytest.approx(2.0), others=1)


def test_all_ranks_waiting_for_their_data_is_said_once() -> None:
    judge, said = SlowRanks(), []
    for _ in range(10):
        judge.look(rows(dict.fromkeys(range(4), (0.4, 0.6))), 30)
        said.append(judge.waits_for_data)
    assert [bool(each) for each in said] == [False] * (LOOKS - 1) + [True] + [False] * (10 - LOOKS)
    assert said[LOOKS - 1] == pytest.approx(0.4, abs=0.01)


def test_the_network_is_measured_where_all_wait_and_for_no_rank() -> None:
    judge = SlowRanks()
    waiting = rows({})
    for row in waiting:
        row[COMMUNICATION] += 1.5
    asked = []
    for _ in range(70):
        judge.look(waiting, 30)
        asked.append(judge.asks_for_ways())
    assert [index for index, each in enumerate(asked) if each] == [LOOKS - 1, LOOKS - 1 + 63]
    assert not judge.waits_no_more
    for _ in range(LOOKS):
        judge.look(rows({}), 30)
    assert judge.waits_no_more
    for _ in range(20):  # the pause goes on, quiet or not
        judge.look(waiting, 30)
        assert not judge.asks_for_ways()
    slow = SlowRanks()
    for _ in range(10):
        slow.look(rows({1: (0.1, 1.7)}), 30)
        assert not slow.asks_for_ways()


@pytest.mark.parametrize(
    ("seconds", "far"),
    [
        ({0: 0.0002, 2: 0.0005, 4: 0.0007}, []),
        ({0: 0.0002, 2: 0.0005, 4: 0.04}, [4]),
        ({0: 0.0002, 2: 0.04, 4: 0.041}, [0]),  # the one that all others are measured from
        ({0: 0.0002, 2: 0.04}, [0, 2]),  # two: it is the way between them
        ({0: 0.0002, 2: 0.0005, 4: 0.004}, []),  # eight times, but nothing
        ({0: 0.0002}, []),
    ],
)
def test_the_machine_with_a_slow_network_is_found(seconds: dict[int, float], far: list[int]) -> None:
    assert far_machines(Ways(0, seconds)) == far
