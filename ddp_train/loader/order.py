"""Which sample comes when: a sampler, cut into global batches, with O(1) memory and random access.

The sample at position k of epoch e is a pure function of (seed, e, k) and the data set (`sampler.py`). A global batch is a slice of that
order, whose size is a function of its position (`BatchPlan`), and a rank's share is a slice of the global batch, so nothing depends on
the number of ranks, workers or restarts, and seeking costs nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_train.hashing import GOLDEN, mix
from ddp_train.interfaces import Indices, Sampler

_AHEAD = 1 << 14  # positions drawn at once: large enough that numpy's cost per call vanishes, small enough for a first batch in 1 ms


def share(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """Return the bounds of one of `count` contiguous shares of [start, stop); the first ones are larger by one where it does not divide."""
    if count == 1:
        return start, stop
    size, num_larger = divmod(stop - start, count)
    low = start + index * size + min(index, num_larger)
    return low, low + size + (index < num_larger)


class GlobalBatch(NamedTuple):
    """One global batch: the slice [start, stop) of its epoch's order."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class BatchOrder:
    """Where global batches begin and epochs end, for data without positions: all batches have one size.

    `length`: samples of an epoch, rounded up to whole batches (with `drop_last` down); None: there are no epochs.
    """

    steps_per_epoch: int | None  # None also where epochs differ: `trainer.batch_size_schedule`
    epoch_size: int | None

    def __init__(self, length: int | None, *, global_batch_size: int, drop_last: bool = False) -> None:
        self.global_batch_size = global_batch_size
        steps = None if length is None else max(1, length // global_batch_size if drop_last else -(-length // global_batch_size))
        self.steps_per_epoch = steps
        self.epoch_size = None if steps is None else steps * global_batch_size

    def batch_at(self, position: int) -> GlobalBatch:
        """Return the global batch that begins at a position of the run, counted in samples. O(1)."""
        epoch, start = (0, position) if self.epoch_size is None else divmod(position, self.epoch_size)
        return GlobalBatch(epoch, start, start + self.global_batch_size)

    def indices(self, epoch: int, start: int, stop: int) -> Indices | None:
        """Return the data set's indices at the positions [start, stop) of an epoch's order, shape [stop - start]; None: it has none."""
        return None

    def samples_after(self, step: int) -> int:
        return step * self.global_batch_size

    def steps_in(self, epochs: int) -> int | None:
        return None if self.steps_per_epoch is None else epochs * self.steps_per_epoch


def epochs(order: BatchOrder, position: int) -> float | None:
    return None if order.epoch_size is None else round(position / order.epoch_size, 4)


class BatchPlan:
    """The size of the global batch at each position: it may change at a step. A function of the position alone, in O(log changes).

    Args:
        epoch_size: samples of an epoch; a batch never reaches into the next one.
        size: samples of a global batch at first.
        changes: from which step on (counted from 0) it is another size, ascending.
    """

    def __init__(self, epoch_size: int, size: int, changes: Sequence[tuple[int, int]] = ()) -> None:
        self._epoch_size = epoch_size
        self._steps, self._starts, self._sizes = [0], [0], [size]
        for step, new_size in changes:
            self._starts.append(self.samples_after(step))
            self._steps.append(step)
            self._sizes.append(new_size)

    def size_at(self, position: int) -> int:
        """Return the size of the batch that begins at a position of the run; the last one of an epoch may be smaller."""
        return self._sizes[bisect_right(self._starts, position) - 1]

    def origin(self, epoch: int, position: int) -> int:
        """Return the position in an epoch from which on its batches have the size that they have at `position`."""
        start = self._starts[bisect_right(self._starts, epoch * self._epoch_size + position) - 1]
        return max(0, start - epoch * self._epoch_size)

    def samples_after(self, step: int) -> int:
        place = bisect_right(self._steps, step) - 1
        steps, size = step - self._steps[place], self._sizes[place]  # since that size began
        epoch, position = divmod(self._starts[place], self._epoch_size)
        in_first_epoch = self._batches(self._epoch_size - position, size)  # which had begun before
        if steps < in_first_epoch:
            return self._starts[place] + steps * size
        epochs, batches = divmod(steps - in_first_epoch, self._batches(self._epoch_size, size))
        return (epoch + 1 + epochs) * self._epoch_size + batches * size

    def steps_in(self, epochs: int) -> int:
        samples = epochs * self._epoch_size
        place = bisect_right(self._starts, samples) - 1
        epoch, position = divmod(self._starts[place], self._epoch_size)
        size, begun = self._sizes[place], samples - epoch * self._epoch_size
        if begun == 0 or samples == self._starts[place]:
            return self._steps[place]
        in_whole_epoch = self._batches(self._epoch_size, size)
        return self._steps[place] + self._batches(self._epoch_size - position, size) + (begun // self._epoch_size - 1) * in_whole_epoch

    @staticmethod
    def _batches(samples: int, size: int) -> int:
        return -(-samples // size)


class SampleOrder(BatchOrder):
    """The order of all samples of all epochs, cut into global batches.

    Args:
        sampler: which sample comes at which position of an epoch.
        global_batch_size: samples of one optimizer step over all ranks.
        drop_last: leave out the last, smaller batch of an epoch; else it is a batch of its own.
        changes: from which step on the global batch has another size; not with `drop_last`: epochs are as long as the data then.
    """

    epoch_size: int

    def __init__(self, sampler: Sampler, *, global_batch_size: int, drop_last: bool, changes: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(sampler.length, global_batch_size=global_batch_size, drop_last=drop_last)
        self._sampler = sampler
        self.epoch_size = min(self.epoch_size, sampler.length)  # the last batch of an epoch may be smaller
        self.steps_per_epoch = None if changes else self.steps_per_epoch
        self._plan = BatchPlan(self.epoch_size, global_batch_size, changes)
        self._rows: dict[tuple[int, int, int], Indices] = {}  # drawn ahead, by epoch, start and stop
        self._held: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # keys of rows, by the slice of a global batch: offset and size
        self._block: tuple[int, int, Indices] | None = None  # epoch, number and indices of some windows, of a sampler that has windows

    def batch_at(self, position: int) -> GlobalBatch:
        epoch, start = divmod(position, self.epoch_size)
        return GlobalBatch(epoch, start, min(start + self._plan.size_at(position), self.epoch_size))

    def samples_after(self, step: int) -> int:
        return self._plan.samples_after(step)

    def steps_in(self, epochs: int) -> int:
        return self._plan.steps_in(epochs)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        row = self._rows.get((epoch, start, stop))
        if row is not None:
            return row
        return self._from_windows(epoch, start, stop) if self._sampler.window > 1 else self._draw(epoch, start, stop)

    def _draw(self, epoch: int, start: int, stop: int) -> Indices:
        """Draw a slice of a global batch, and the same slice of the next ones: a rank reads that slice of one after another."""
        stride = self._plan.size_at(epoch * self.epoch_size + start)
        origin = self._plan.origin(epoch, start)
        size = stop - start
        num_batches = min(max(1, _AHEAD // size), 1 + (self._sampler.length - stop) // stride)
        starts = start + stride * np.arange(num_batches)
        rows = self._sampler(epoch, (starts[:, None] + np.arange(size)).reshape(-1)).reshape(num_batches, size)
        own_slice = (start - origin) % stride, size
        for key in self._held.get(own_slice, ()):
            self._rows.pop(key, None)
        self._held[own_slice] = [(epoch, first, first + size) for first in starts.tolist()]
        self._rows.update(zip(self._held[own_slice], rows, strict=True))
        return self._rows[epoch, start, stop]

    def _from_windows(self, epoch: int, start: int, stop: int) -> Indices:
        block_size = -(-_AHEAD // self._sampler.window) * self._sampler.window
        pieces = []
        while start < stop:
            number, block = start // block_size, self._block
            low = number * block_size
            if block is None or block[:2] != (epoch, number):
                positions = np.arange(low, min(low + block_size, self._sampler.length))
                block = self._block = epoch, number, self._sampler(epoch, positions)
            border = min(stop, low + block_size)
            pieces.append(block[2][start - low : border - low])
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
        """Return the partner of the sample at each position of an epoch, and the partner's position, both [n].

        Positions are moved on by one number for each epoch, so each sample is the partner of one.
        """
        length = self._sampler.length
        step = 1 + int(self.sample_keys(epoch, np.asarray([-1], np.int64))[0]) % max(1, length - 1)
        partner_positions = (positions + step) % length
        return self._sampler(epoch, partner_positions), partner_positions

    def replacements(self, epoch: int, index: int, *, count: int) -> Indices:
        """Return samples of the same epoch that may stand in for one that cannot be read, a function of (seed, epoch, index) alone."""
        first = int(self.sample_keys(epoch, np.asarray([index], np.int64))[0]) % self._sampler.length
        return self._sampler(epoch, (first + np.arange(count)) % self._sampler.length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": {}, "_held": {}, "_block": None}  # for data-loader workers: each draws for itself
