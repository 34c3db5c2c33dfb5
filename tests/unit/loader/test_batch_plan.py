"""Global batches whose size changes: cut by the position alone, found without counting, and the same samples on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from ddp_train.loader.batch_plan import BatchPlan
from ddp_train.loader.loader import TrainLoader
from ddp_train.loader.order import GlobalBatch, SampleOrder
from ddp_train.loader.sampler import Shuffled
from tests.unit.loader.numbers import Numbers

PLANS = [
    (10, 4, []),
    (10, 4, [(1, 2), (5, 10)]),  # within the first epoch
    (10, 3, [(4, 7)]),  # where an epoch begins
    (7, 2, [(9, 3), (9 + 20, 1), (9 + 20 + 30, 7)]),
    (5, 5, [(1, 1), (2, 5), (3, 2)]),
]


def counted(epoch_size: int, size: int, changes: list[tuple[int, int]]) -> Iterator[GlobalBatch]:
    """Yield one batch after another, as a loop over epochs would."""
    step = epoch = 0
    while True:
        start = 0
        while start < epoch_size:
            wanted = [size, *(new for first, new in changes if first <= step)][-1]
            yield GlobalBatch(epoch, start, min(start + wanted, epoch_size))
            start, step = start + wanted, step + 1
        epoch += 1


@pytest.mark.parametrize(("epoch_size", "size", "changes"), PLANS)
def test_steps_and_positions_are_those_of_counting(epoch_size: int, size: int, changes: list[tuple[int, int]]) -> None:
    plan = BatchPlan(epoch_size, size, changes)
    order = SampleOrder(Shuffled(epoch_size, seed=0), global_batch_size=size, drop_last=False, changes=changes)
    samples, ends = 0, dict[int, int]()
    for step, batch in enumerate(islice(counted(epoch_size, size, changes), 100)):
        assert plan.samples_after(step) == order.samples_after(step) == samples, step
        assert order.batch_at(samples) == batch, step
        samples += batch.size
        if batch.stop == epoch_size:
            ends[batch.epoch + 1] = step + 1
    assert {epochs: plan.steps_in(epochs) for epochs in ends} == ends
    assert plan.steps_in(0) == 0


def by_size(size: int) -> int:
    return 1 + size // 3


@pytest.mark.parametrize(("epoch_size", "size", "changes"), PLANS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_reads_the_same_global_batches_from_anywhere(
    epoch_size: int, size: int, changes: list[tuple[int, int]], world_size: int
) -> None:
    plain = SampleOrder(Shuffled(epoch_size, seed=3), global_batch_size=1, drop_last=False)
    steps, first = 40, 7
    batches = list(islice(counted(epoch_size, size, changes), steps))
    most = max(by_size(each) for each in (size, *(new for _, new in changes)))
    read: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        order = SampleOrder(Shuffled(epoch_size, seed=3), global_batch_size=size, drop_last=False, changes=changes)
        split = {"rank": rank, "world_size": world_size, "num_workers": 0, "pin_memory": False}
        loader = TrainLoader(Numbers(epoch_size), order, **split, grad_accum_steps=most, by_size=by_size)  # type: ignore[arg-type]
        samples = order.samples_after(first)
        stream = loader.micro_batches(samples)  # in the middle, without a batch before
        for step in range(first, steps):
            assert loader.micro_steps(samples) == by_size(batches[step].size)  # of a short last batch, fewer: batch norm needs two samples
            for micro_batch in islice(stream, loader.micro_steps(samples)):
                read[step] += micro_batch.batch.tolist() if micro_batch.counts else []
            samples += batches[step].size
    for step in range(first, steps):
        batch = batches[step]
        assert sorted(read[step]) == sorted(plain.indices(batch.epoch, batch.start, batch.stop).tolist()), step


def test_what_is_drawn_ahead_is_not_mixed_up_when_the_size_changes() -> None:
    """Two sizes with parts of one size at the same place in their batches."""
    order = SampleOrder(Shuffled(100, seed=1), global_batch_size=10, drop_last=False, changes=[(3, 20)])
    every = SampleOrder(Shuffled(100, seed=1), global_batch_size=100, drop_last=False).indices(0, 0, 100)
    for start in (0, 10, 20, 30, 50, 70, 90, 30, 20):
        assert np.array_equal(order.indices(0, start, start + 5), every[start : start + 5]), start
