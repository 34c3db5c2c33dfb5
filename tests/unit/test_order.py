"""The order of the samples: a bijection that depends on seed, epoch and length alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ddp_train.data.order import Permutation, SampleOrder, share


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 16, 97, 100, 1023, 1024, 1025, 60_000, 99_991])
def test_a_permutation_is_a_bijection(length: int) -> None:
    elements = Permutation(length, key=7)(np.arange(length))
    assert np.array_equal(np.sort(elements), np.arange(length))


def test_a_permutation_of_any_size_needs_no_memory_and_can_be_entered_anywhere() -> None:
    permutation = Permutation(10**12, key=3)
    somewhere = permutation(np.arange(123_456_789_000, 123_456_789_100))
    assert len(set(somewhere.tolist())) == 100
    assert np.array_equal(somewhere[40:41], permutation(np.asarray([123_456_789_040])))


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    def order(seed: int, epoch: int, batch: int = 10) -> list[int]:
        return SampleOrder(1000, seed=seed, global_batch_size=batch, drop_last=False).indices(epoch, 0, 1000).tolist()

    assert order(1, 0) == order(1, 0, batch=33)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)
    assert sum(a == b for a, b in zip(order(1, 0), range(1000), strict=True)) < 20  # it does shuffle


def test_a_slice_across_the_border_of_two_blocks_is_joined() -> None:
    order = SampleOrder(40_000, seed=0, global_batch_size=64, drop_last=False)
    whole = Permutation(40_000, key=int(np.random.SeedSequence([0, 3]).generate_state(1, np.uint64)[0]))(np.arange(40_000))
    assert np.array_equal(order.indices(3, 16_000, 33_000), whole[16_000:33_000])


@pytest.mark.parametrize(("length", "parts"), [(96, 4), (97, 4), (3, 5), (0, 3), (10, 1)])
def test_shares_are_contiguous_complete_and_differ_by_one_at_most(length: int, parts: int) -> None:
    bounds = [share(5, 5 + length, part, parts) for part in range(parts)]
    assert bounds[0][0] == 5
    assert bounds[-1][1] == 5 + length
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_the_last_batch_of_an_epoch_is_smaller_or_left_out() -> None:
    kept = SampleOrder(10, seed=0, global_batch_size=4, drop_last=False)
    assert [kept.batch_at(samples).size for samples in (0, 4, 8)] == [4, 4, 2]
    assert kept.batch_at(10).epoch == 1
    dropped = SampleOrder(10, seed=0, global_batch_size=4, drop_last=True)
    assert (dropped.steps_per_epoch, dropped.batch_at(8).epoch) == (2, 1)


def test_sample_keys_depend_on_seed_epoch_and_index() -> None:
    order = SampleOrder(100, seed=5, global_batch_size=4, drop_last=False)
    keys = order.sample_keys(2, np.asarray([3, 9, 3]))
    assert keys[0] == keys[2] != keys[1]
    assert keys[0] != order.sample_keys(3, np.asarray([3]))[0]
    assert keys[0] != SampleOrder(100, seed=6, global_batch_size=4, drop_last=False).sample_keys(2, np.asarray([3]))[0]
