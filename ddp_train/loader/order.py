"""Which sample comes when: a sampler, cut into global batches, with O(1) memory and random access.

The sample at position k of epoch e is a pure function of (seed, e, k) and the data set (`sampler.py`). A global batch is a slice of that
order, whose size is a function of its position (`batch_plan.py`), and a rank's share is a slice of the global batch, so nothing depends on
the number of ranks, workers or restarts, and seeking costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddp_train.hashing import GOLDEN, mix
from ddp_train.interfaces import Indices, Sampler
from ddp_train.loader.batch_plan import BatchPlan

_AHEAD = 1 << 14  # positions drawn at once: large enough that numpy's cost per call vanishes, small enough for a first batch in 1 ms


def share(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    """Cut [start, stop) into contiguous parts, the first ones larger by one where it does not divide; return the bounds of one."""
    if parts == 1:
        return start, stop
    size, rest = divmod(stop - start, parts)
    low = start + part * size + min(part, rest)
    return low, low + size + (part < rest)


class GlobalBatch(NamedTuple):
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
    def steps_per_epoch(self) -> int | None:
        """None also where the epochs differ: `trainer.batch_size_schedule`."""

    def batch_at(self, samples: int) -> GlobalBatch:
        """Return the global batch that begins after `samples` samples."""

    def samples_after(self, step: int) -> int:
        """Return how many samples the first `step` steps take."""

    def steps_in(self, epochs: int) -> int | None:
        """Return how many steps so many epochs have."""


def epochs(order: BatchOrder, samples: int) -> float | None:
    """Return how many epochs `samples` samples are."""
    return None if order.epoch_size is None else round(samples / order.epoch_size, 4)


class SampleOrder:
    """The order of all samples of all epochs, cut into global batches.

    Args:
        sampler: which sample comes at which position of an epoch.
        global_batch_size: samples of one optimizer step over all ranks.
        drop_last: leave out the last, smaller batch of an epoch; else it is a batch of its own.
        changes: from which step on the global batch has another size; not with `drop_last`: epochs are as long as the data then.
    """

    def __init__(self, sampler: Sampler, *, global_batch_size: int, drop_last: bool, changes: Sequence[tuple[int, int]] = ()) -> None:
        self._sampler = sampler
        self.global_batch_size = global_batch_size
        self.epoch_size = sampler.length - sampler.length % global_batch_size if drop_last else sampler.length
        self.steps_per_epoch = None if changes else -(-self.epoch_size // global_batch_size)
        self._plan = BatchPlan(self.epoch_size, global_batch_size, changes)
        self._asked: tuple[int, GlobalBatch] | None = None
        # What has been drawn ahead.
        self._rows: dict[tuple[int, int, int], Indices] = {}  # by epoch, start and stop
        self._keys: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # those of each part of a global batch
        self._block: _Block | None = None

    def batch_at(self, samples: int) -> GlobalBatch:
        """Return the global batch that begins after `samples` samples. O(1)."""
        asked = self._asked  # in a step several ask for the same one
        if asked is None or asked[0] != samples:
            epoch, start = divmod(samples, self.epoch_size)
            batch = GlobalBatch(epoch, start, min(start + self._plan.size_at(samples), self.epoch_size))
            asked = self._asked = samples, batch
        return asked[1]

    def samples_after(self, step: int) -> int:
        """Return how many samples the first `step` steps take."""
        return self._plan.samples_after(step)

    def steps_in(self, epochs: int) -> int:
        """Return how many steps so many epochs have."""
        return self._plan.steps_in(epochs)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the data set's indices at the positions [start, stop) of an epoch's order, shape [stop - start]."""
        row = self._rows.get((epoch, start, stop))
        if row is not None:
            return row
        return self._from_windows(epoch, start, stop) if self._sampler.window > 1 else self._draw(epoch, start, stop)

    def _draw(self, epoch: int, start: int, stop: int) -> Indices:
        """A rank reads the same part of one global batch after another: that part of the next ones is drawn with it, nobody else's."""
        stride, origin = self._plan.size_at(epoch * self.epoch_size + start), self._plan.origin(epoch, start)
        size = stop - start
        num_batches = min(max(1, _AHEAD // size), 1 + (self._sampler.length - stop) // stride)
        starts = start + stride * np.arange(num_batches)
        rows = self._sampler(epoch, (starts[:, None] + np.arange(size)).reshape(-1)).reshape(num_batches, size)
        part = (start - origin) % stride, size
        for key in self._keys.get(part, ()):
            self._rows.pop(key, None)
        self._keys[part] = [(epoch, first, first + size) for first in starts.tolist()]
        self._rows.update(zip(self._keys[part], rows, strict=True))
        first_row: Indices = rows[0]
        return first_row

    def _from_windows(self, epoch: int, start: int, stop: int) -> Indices:
        block_size = -(-_AHEAD // self._sampler.window) * self._sampler.window
        pieces = []
        while start < stop:
            number = start // block_size
            low = number * block_size
            block = self._block
            if block is None or (block.epoch, block.number) != (epoch, number):
                positions = np.arange(low, min(low + block_size, self._sampler.length))
                block = self._block = _Block(epoch, number, self._sampler(epoch, positions))
            border = min(stop, low + block_size)
            pieces.append(block.indices[start - low : border - low])
            start = border
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def sample_keys(self, epoch: int, indices: Indices, *, positions: Indices | None = None) -> NDArray[np.uint64]:
        """Return 64 random bits for each sample, a function of (seed, epoch, index) alone; augmentation draws from them.

        Args:
            indices: of the samples, [n].
            positions: theirs in the epoch's order, [n]: a sample that comes twice in an epoch has another key each time.
        """
        with np.errstate(over="ignore"):
            salt = mix(np.asarray([self._sampler.seed], np.uint64) * GOLDEN + np.uint64(epoch))
            keys = mix(mix(indices.astype(np.uint64) + GOLDEN) ^ salt)
        if positions is None or not self._sampler.repeats:
            return keys
        return mix(mix(positions.astype(np.uint64) + GOLDEN) ^ keys)

    def partners(self, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """Return the sample that goes with the one at each position of an epoch, and its own position, both [n].

        In an epoch each sample goes with one: positions are moved on by a number that is the epoch's.
        """
        length = self._sampler.length
        step = 1 + int(self.sample_keys(epoch, np.asarray([-1], np.int64))[0]) % max(1, length - 1)
        others = (positions + step) % length
        return self._sampler(epoch, others), others

    def others(self, epoch: int, index: int, *, count: int) -> Indices:
        """Return samples of the same epoch that may stand in for one that cannot be read, a function of (seed, epoch, index) alone."""
        first = int(self.sample_keys(epoch, np.asarray([index], np.int64))[0]) % self._sampler.length
        return self._sampler(epoch, (first + np.arange(count)) % self._sampler.length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": {}, "_keys": {}, "_block": None}  # for data-loader workers: each draws for itself


class _Block(NamedTuple):
    """What has been drawn of a sampler with windows: several of them, one after the other."""

    epoch: int
    number: int
    indices: Indices
