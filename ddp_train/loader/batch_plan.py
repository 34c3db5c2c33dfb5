"""How large the global batch is at each position of the data, and how steps and positions go together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class BatchPlan:
    """A size for each position, where steps change it or not: a function of the position alone, in O(log changes).

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

    def size_at(self, samples: int) -> int:
        """Return the size of the batch that begins after `samples` samples; the last one of an epoch may be smaller."""
        return self._sizes[bisect_right(self._starts, samples) - 1]

    def origin(self, epoch: int, position: int) -> int:
        """Return the position in an epoch from which on its batches have the size that they have at `position`."""
        start = self._starts[bisect_right(self._starts, epoch * self._epoch_size + position) - 1]
        return max(0, start - epoch * self._epoch_size)

    def samples_after(self, step: int) -> int:
        """Return how many samples the first `step` steps take."""
        place = bisect_right(self._steps, step) - 1
        left, size = step - self._steps[place], self._sizes[place]
        epoch, position = divmod(self._starts[place], self._epoch_size)
        rest = self._batches(self._epoch_size - position, size)  # of the epoch that has begun
        if left < rest:
            return self._starts[place] + left * size
        epochs, batches = divmod(left - rest, self._batches(self._epoch_size, size))
        return (epoch + 1 + epochs) * self._epoch_size + batches * size

    def steps_in(self, epochs: int) -> int:
        """Return how many steps so many epochs have."""
        samples = epochs * self._epoch_size
        place = bisect_right(self._starts, samples) - 1
        epoch, position = divmod(self._starts[place], self._epoch_size)
        size, begun = self._sizes[place], samples - epoch * self._epoch_size
        if begun == 0 or samples == self._starts[place]:
            return self._steps[place]
        whole = self._batches(self._epoch_size, size)
        return self._steps[place] + self._batches(self._epoch_size - position, size) + (begun // self._epoch_size - 1) * whole

    @staticmethod
    def _batches(samples: int, size: int) -> int:
        return -(-samples // size)
