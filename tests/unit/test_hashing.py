"""Numbers that look random and follow from what they are of."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.hashing import Permutation, permute_each, random_bits


def test_bits_follow_splitmix64():
    # The published first outputs of SplitMix64 seeded with 1234567: output n mixes seed + n * gamma, which is our draw n - 1.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_bits(np.asarray([1234567], np.uint64), np.arange(4, dtype=np.uint64)).tolist() == expected


quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
keys = st.integers(0, 2**64 - 1)


@quick
@given(length=st.one_of(st.integers(1, 300), st.integers(1, 100_000)), key=keys)
def test_a_permutation_is_a_bijection(length: int, key: int) -> None:
    elements = Permutation(length, key)(np.arange(length))
    assert np.array_equal(np.sort(elements), np.arange(length))


@quick
@given(length=st.one_of(st.sampled_from([2**32 - 1, 2**32, 2**32 + 1, 10**12]), st.integers(10**11, 10**12)), key=keys, data=st.data())
def test_a_permutation_of_any_size_needs_no_memory_and_can_be_entered_anywhere(length: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(length, key)
    starts = data.draw(st.lists(st.integers(0, length - 500), min_size=1, max_size=4))
    positions = np.unique(np.concatenate([np.arange(start, start + 500) for start in [0, length - 500, *starts]]))
    elements = permutation(positions)
    assert elements.min() >= 0 and elements.max() < length
    assert len(np.unique(elements)) == len(positions)
    one = data.draw(st.integers(0, len(positions) - 1))
    assert np.array_equal(permutation(positions[one : one + 1]), elements[one : one + 1])


@quick
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20), key=keys)
def test_many_permutations_at_once_are_bijections_each(lengths: list[int], key: int) -> None:
    positions = np.concatenate([np.arange(length) for length in lengths])
    each = np.repeat(lengths, lengths)
    own_keys = np.repeat(np.arange(len(lengths), dtype=np.uint64) + np.uint64(key // 2), lengths)
    elements = np.split(permute_each(positions, each, own_keys), np.cumsum(lengths)[:-1])
    for length, found in zip(lengths, elements, strict=True):
        assert np.array_equal(np.sort(found), np.arange(length))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7])
def test_short_permutations_are_all_equally_likely(length: int) -> None:
    num_keys = 30_240
    positions, of_key = np.tile(np.arange(length), num_keys), np.repeat(np.arange(num_keys, dtype=np.uint64), length)
    orders = permute_each(positions, np.full_like(positions, length), of_key).reshape(num_keys, length)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    possible = factorial(length)
    expected = num_keys / possible
    chi_squared = ((counts - expected) ** 2 / expected).sum() + (possible - len(counts)) * expected
    assert chi_squared < possible + 6 * (2 * possible) ** 0.5  # six sigma


@pytest.mark.parametrize("length", [99_991, 100_000, 2**17])
def test_a_permutation_looks_random(length: int) -> None:
    positions = np.arange(length)
    for key in range(8):
        elements = Permutation(length, key)(positions)
        assert abs(np.corrcoef(positions, elements)[0, 1]) < 5 / length**0.5
        for distance in (1, 2, 317):  # 317: beside each other in the network's square of 317 x 316
            assert abs(np.corrcoef(elements[:-distance], elements[distance:])[0, 1]) < 5 / length**0.5
            neighbours = np.abs(elements[distance:] - elements[:-distance]) == 1
            assert neighbours.sum() < 20  # about 2 by chance
        cells, _, _ = np.histogram2d(positions, elements, bins=16)
        assert ((cells - length / 256) ** 2 / (length / 256)).sum() < 256 + 6 * (2 * 256) ** 0.5


def test_two_keys_give_unrelated_permutations() -> None:
    first, second = (Permutation(100_000, key)(np.arange(100_000)) for key in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / 100_000**0.5
    assert (first == second).sum() < 12  # about 1 by chance


def test_the_elements_stay_what_they_were_in_earlier_versions() -> None:
    assert Permutation(1000, key=7)(np.arange(6)).tolist() == [986, 669, 362, 135, 580, 858]
    assert Permutation(10**12, key=7)(np.arange(10**11, 10**11 + 2)).tolist() == [149371713237, 745159372080]
