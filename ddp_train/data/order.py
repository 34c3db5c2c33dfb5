"""Which sample comes when: a keyed permutation of the data set, with O(1) memory and random access.

Sample k of epoch e is a pure function of (seed, e, k, length). A global batch is a slice of that order and a rank's share is a
slice of the global batch, so nothing depends on the number of ranks, workers or restarts, and seeking costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddp_train.interfaces import Indices

_ROUNDS = 6
_BLOCK = 1 << 14  # positions permuted at once: large enough that numpy's cost per call vanishes


class Permutation:
    """A bijection of 0..length-1, chosen by a key.

    A Feistel network whose halves are residues: with a x b >= length, each round adds a keyed hash of one half to the other, modulo
    a or b. Positions that leave the range walk on until they are inside (fewer than a of the a x b are outside).

    Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains" (generalised Feistel, cycle walking).
    """

    def __init__(self, length: int, key: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation needs at least one element, not {length}")
        self.length = length
        self._left = isqrt(length - 1) + 1
        self._right = -(-length // self._left)
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Return the elements at `positions`, shape [n] -> [n]."""
        found = self._encipher(positions.astype(np.uint64))
        outside = found >= self.length
        while outside.any():
            found[outside] = self._encipher(found[outside])
            outside = found >= self.length
        return found.astype(np.int64)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, np.uint64(self._right))
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = _add(left, mix(right ^ key), self._left)
            else:
                right = _add(right, mix(left ^ key), self._right)
        return left * np.uint64(self._right) + right


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit values. Source: splitmix64's finaliser (Steele, Lea & Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def share(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    """Cut [start, stop) into contiguous parts, the first ones larger by one where it does not divide; return the bounds of one."""
    size, rest = divmod(stop - start, parts)
    low = start + part * size + min(part, rest)
    return low, low + size + (part < rest)


@dataclass(frozen=True)
class GlobalBatch:
    """One global batch: the slice [start, stop) of its epoch's order."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class BatchOrder(Protocol):
    """Where global batches begin and epochs end. None: there are no epochs."""

    @property
    def epoch_size(self) -> int | None: ...

    @property
    def steps_per_epoch(self) -> int | None: ...

    def batch_at(self, samples: int) -> GlobalBatch:
        """Return the global batch that begins after `samples` samples."""


def epochs(order: BatchOrder, samples: int) -> float | None:
    """Return how many epochs `samples` samples are."""
    return None if order.epoch_size is None else round(samples / order.epoch_size, 4)


class SampleOrder:
    """The order of all samples of all epochs, cut into global batches.

    Args:
        length: samples in the data set.
        seed: the run's seed.
        global_batch_size: samples of one optimizer step over all ranks.
        drop_last: leave out the last, smaller batch of an epoch; else it is a batch of its own.
    """

    def __init__(self, length: int, *, seed: int, global_batch_size: int, drop_last: bool) -> None:
        self._length = length
        self._seed = seed
        self.global_batch_size = global_batch_size
        self.epoch_size = length - length % global_batch_size if drop_last else length
        self.steps_per_epoch = -(-self.epoch_size // global_batch_size)
        self._block = (-1, -1)
        self._elements: Indices = np.empty(0, np.int64)
        self._permutation: tuple[int, Permutation] | None = None

    def batch_at(self, samples: int) -> GlobalBatch:
        """Return the global batch that begins after `samples` samples. O(1)."""
        epoch, start = divmod(samples, self.epoch_size)
        return GlobalBatch(epoch, start, min(start + self.global_batch_size, self.epoch_size))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the data set's indices at the positions [start, stop) of an epoch's order, shape [stop - start]."""
        first = start // _BLOCK
        if stop > (first + 1) * _BLOCK:  # the slice crosses a border: both sides, joined
            border = (first + 1) * _BLOCK
            return np.concatenate([self.indices(epoch, start, border), self.indices(epoch, border, stop)])
        if self._block != (epoch, first):
            low, high = first * _BLOCK, min((first + 1) * _BLOCK, self._length)
            self._elements = self._permuted(epoch)(np.arange(low, high))
            self._block = (epoch, first)
        return self._elements[start - first * _BLOCK : stop - first * _BLOCK]

    def sample_keys(self, epoch: int, indices: Indices) -> NDArray[np.uint64]:
        """Return 64 random bits for each sample, a function of (seed, epoch, index) alone; augmentation draws from them."""
        with np.errstate(over="ignore"):
            salt = mix(np.asarray([self._seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(epoch))
            return mix(mix(indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) ^ salt)

    def _permuted(self, epoch: int) -> Permutation:
        if self._permutation is None or self._permutation[0] != epoch:
            key = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1, np.uint64)[0])
            self._permutation = (epoch, Permutation(self._length, key))
        return self._permutation[1]


def _add(values: NDArray[np.uint64], hashes: NDArray[np.uint64], modulus: int) -> NDArray[np.uint64]:
    total = values + ((hashes >> np.uint64(32)) * np.uint64(modulus) >> np.uint64(32))  # a multiply and a shift instead of a division
    return np.where(total >= modulus, total - np.uint64(modulus), total)
