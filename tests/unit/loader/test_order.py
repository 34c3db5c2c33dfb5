"""The order of the samples: what the ranks read together is the order's slices, whatever their number, however often it changes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.interfaces import Sampler
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import BatchPlan, GlobalBatch, SampleOrder, share
from ddp_train.loader.sampler import Balanced, Bucketed, Shuffled, Weighted
from tests.unit.loader.numbers import Numbers

quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def make_draw(kind: str, length: int, seed: int, batch: int, drop_last: bool) -> Sampler:
    """Return the draw that a kind names, as `plain` or `plain bucketed`."""
    plain = kind.split()[0]
    draw: Sampler
    if plain == "shuffled":
        draw = Shuffled(length, seed=seed)
    elif plain == "weighted":
        draw = Weighted(np.arange(length) % 4 + 0.5, seed=seed)
    else:
        draw = Balanced(np.arange(length) ** 2 % 5, seed=seed, multiple_of=batch if drop_last else 1)
    return Bucketed(draw, np.arange(length) * 7 % 11, global_batch_size=batch, batches=3) if "bucketed" in kind else draw


kinds = st.sampled_from([plain + more for plain in ("shuffled", "weighted", "balanced") for more in ("", " bucketed")])
splits = st.tuples(st.sampled_from([1, 2, 3, 5, 8]), st.integers(1, 4), st.integers(1, 6))


@quick
@given(
    kind=kinds,
    length=st.integers(1, 90),
    batch=st.integers(1, 40),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32),
    segments=st.lists(splits, min_size=1, max_size=4),
)
def test_the_ranks_read_the_slices_of_the_order_through_any_stops_and_changes_of_their_number(
    kind: str, length: int, batch: int, drop_last: bool, seed: int, segments: list[tuple[int, int, int]]
) -> None:
    """A segment is (world size, accumulation, steps until the next stop)."""
    batch = min(batch, length)
    draw = make_draw(kind, length, seed, batch, drop_last)
    if draw.length < batch:
        batch = max(1, draw.length)
        draw = make_draw(kind, length, seed, batch, drop_last)
    order = SampleOrder(draw, global_batch_size=batch, drop_last=drop_last)
    num_epochs = -(-sum(steps for _, _, steps in segments) // order.steps_per_epoch)
    alone = np.concatenate([draw(epoch, np.arange(order.epoch_size)) for epoch in range(num_epochs)])  # in one go, not batch by batch
    samples = 0
    for world_size, parts, steps in segments:
        streams = [
            PositionedTrainLoader(
                Numbers(length),
                pickle.loads(pickle.dumps(order)),
                rank=rank,
                world_size=world_size,
                grad_accum_steps=parts,
                num_workers=0,
                pin_memory=False,
            ).micro_batches(samples)
            for rank in range(world_size)
        ]
        for _ in range(steps):
            size = order.batch_at(samples).size
            micro_batches = [micro_batch for stream in streams for micro_batch in islice(stream, parts)]
            read = list(chain.from_iterable(micro_batch.batch.tolist() for micro_batch in micro_batches if not micro_batch.is_stand_in))
            assert read == alone[samples : samples + size].tolist()
            samples += size


@quick
@given(length=st.integers(1, 500), batch=st.integers(1, 60), drop_last=st.booleans(), bucketed=st.booleans(), seed=st.integers(0, 2**32))
def test_an_epoch_is_every_sample_once_and_only_its_last_batch_is_smaller_or_left_out(
    length: int, batch: int, drop_last: bool, bucketed: bool, seed: int
) -> None:
    batch = min(batch, length)
    draw = make_draw("shuffled bucketed" if bucketed else "shuffled", length, seed, batch, drop_last)
    order = SampleOrder(draw, global_batch_size=batch, drop_last=drop_last)
    for epoch in (0, 1):
        first = epoch * order.epoch_size
        batches = [order.batch_at(first + step * batch) for step in range(order.steps_per_epoch)]
        found = np.concatenate([order.indices(each.epoch, each.start, each.stop) for each in batches])
        assert {each.epoch for each in batches} == {epoch}
        assert [each.size for each in batches[:-1]] == [batch] * (len(batches) - 1)
        assert batches[-1].size == (batch if drop_last or length % batch == 0 else length % batch)
        assert len(np.unique(found)) == len(found) == length - (length % batch if drop_last else 0)
        assert order.batch_at(first + order.epoch_size).epoch == epoch + 1
        plain = Shuffled(length, seed=seed)(epoch, np.arange(order.epoch_size))
        assert np.array_equal(np.sort(found), np.sort(plain))  # which ones are left out does not depend on lengths


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    def order(seed: int, epoch: int, batch: int = 10) -> list[int]:
        return SampleOrder(Shuffled(1000, seed=seed), global_batch_size=batch, drop_last=False).indices(epoch, 0, 1000).tolist()

    assert order(1, 0) == order(1, 0, batch=33)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)
    assert sum(a == b for a, b in zip(order(1, 0), range(1000), strict=True)) < 20  # it does shuffle
    assert order(0, 0)[:6] == [688, 597, 185, 38, 692, 297]  # as in earlier versions: their runs can be continued


@pytest.mark.parametrize("batch", [64, 2000, 30_000])
@pytest.mark.parametrize("bucketed", [False, True])
def test_what_is_drawn_ahead_changes_nothing(batch: int, bucketed: bool) -> None:
    draw: Sampler = Shuffled(70_000, seed=0)
    if bucketed:
        draw = Bucketed(draw, np.arange(70_000) % 97, global_batch_size=batch, batches=10)
    order = SampleOrder(draw, global_batch_size=batch, drop_last=False)
    for epoch in (3, 4, 3):
        whole = draw(epoch, np.arange(70_000))
        for start, stop in (
            (0, 64),
            (64, 128),
            (16_000, 17_000),
            (16_000, 52_000),
            (65_536, 70_000),
            (69_990, 70_000),
            (0, 64),
            (0, 70_000),
        ):
            assert np.array_equal(order.indices(epoch, start, stop), whole[start:stop])


@pytest.mark.parametrize(("length", "parts"), [(96, 4), (97, 4), (3, 5), (0, 3), (10, 1)])
def test_shares_are_contiguous_complete_and_differ_by_one_at_most(length: int, parts: int) -> None:
    bounds = [share(5, 5 + length, part, parts) for part in range(parts)]
    assert bounds[0][0] == 5
    assert bounds[-1][1] == 5 + length
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_sample_keys_depend_on_seed_epoch_and_index() -> None:
    def keys(seed: int, epoch: int, indices: list[int]) -> list[int]:
        order = SampleOrder(Shuffled(100, seed=seed), global_batch_size=4, drop_last=False)
        return order.sample_keys(epoch, np.asarray(indices), positions=np.arange(len(indices))).tolist()

    first, other, again = keys(5, 2, [3, 9, 3])
    assert first == again != other
    assert first != keys(5, 3, [3])[0]
    assert first != keys(6, 2, [3])[0]


def test_a_sample_that_comes_twice_in_an_epoch_has_another_key_each_time() -> None:
    order = SampleOrder(Weighted(np.ones(100), seed=5), global_batch_size=4, drop_last=False)
    keys = order.sample_keys(0, np.asarray([7, 7, 8]), positions=np.arange(3))
    assert len(set(keys.tolist())) == 3
    assert order.sample_keys(0, np.asarray([7]), positions=np.asarray([1]))[0] == keys[1]


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


def num_micro_batches_of(size: int) -> int:
    return 1 + size // 3


@pytest.mark.parametrize(("epoch_size", "size", "changes"), PLANS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_reads_the_same_global_batches_from_anywhere(
    epoch_size: int, size: int, changes: list[tuple[int, int]], world_size: int
) -> None:
    plain = SampleOrder(Shuffled(epoch_size, seed=3), global_batch_size=1, drop_last=False)
    steps, first = 40, 7
    batches = list(islice(counted(epoch_size, size, changes), steps))
    most = max(num_micro_batches_of(each) for each in (size, *(new for _, new in changes)))
    read: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        order = SampleOrder(Shuffled(epoch_size, seed=3), global_batch_size=size, drop_last=False, changes=changes)
        split = {"rank": rank, "world_size": world_size, "num_workers": 0, "pin_memory": False}
        loader = PositionedTrainLoader(
            Numbers(epoch_size), order, **split, grad_accum_steps=most, num_micro_batches_of=num_micro_batches_of
        )
        samples = order.samples_after(first)
        stream = loader.micro_batches(samples)  # in the middle, without a batch before
        for step in range(first, steps):
            # Of a short last batch, fewer: batch norm needs two samples.
            assert loader.num_micro_batches(samples) == num_micro_batches_of(batches[step].size)
            for micro_batch in islice(stream, loader.num_micro_batches(samples)):
                read[step] += [] if micro_batch.is_stand_in else micro_batch.batch.tolist()
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
