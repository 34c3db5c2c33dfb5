"""A rank's micro-batches, in the global order; and a rank's share of the evaluation set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data._utils.pin_memory import pin_memory

from ddp_train.data.order import SampleOrder, share
from ddp_train.data.workers import WorkerDied, Workers, died
from ddp_train.errors import UserError
from ddp_train.interfaces import Augmenting, Batch, DataSource


@dataclass(frozen=True)
class MicroBatch:
    """What one rank feeds to one forward.

    `counts` is False for a stand-in: a rank without a sample of its own runs another's with weight zero, because all ranks must take
    part in the all-reduce.
    """

    batch: Batch
    counts: bool

    def pin_memory(self) -> MicroBatch:
        """Return a copy in page-locked memory."""
        return MicroBatch(pin_memory(self.batch), self.counts)


@dataclass(frozen=True)
class _Request:
    """One micro-batch that is wanted, as positions [start, stop) in an epoch's order; travels to the workers."""

    epoch: int
    start: int
    stop: int
    counts: bool


class TrainLoader:
    """The training data of one rank.

    Args:
        source: the training split.
        order: the order of all samples.
        rank: this rank.
        world_size: ranks that share each global batch.
        grad_accum_steps: micro-batches of each rank in a step.
        num_workers: processes that read ahead; 0 reads in this one. What they read ahead is not counted as trained on.
        pin_memory: copy batches to page-locked memory, for faster transfer to a GPU.
    """

    def __init__(
        self,
        source: DataSource,
        order: SampleOrder,
        *,
        rank: int,
        world_size: int,
        grad_accum_steps: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.order = order
        self._source = source
        self.grad_accum_steps = grad_accum_steps
        self._rank, self._world_size = rank, world_size
        self._num_workers, self._pin_memory = num_workers, pin_memory

    def micro_batches(self, samples: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches for ever, from the step that begins after `samples` samples; seeking is O(1)."""
        read = _Reader(self._source, self.order)
        requests = self._requests(samples)
        if self._num_workers == 0:
            yield from (read(request).pin_memory() if self._pin_memory else read(request) for request in requests)
            return
        workers = Workers(read, self._num_workers, pin_memory=self._pin_memory)
        try:
            yield from workers.results(requests)
        except WorkerDied as error:
            asked = error.request
            raise died(error, f"the samples {self.order.indices(asked.epoch, asked.start, asked.stop).tolist()}") from None
        finally:
            workers.close()

    def peek(self) -> MicroBatch:
        """Return this rank's very first micro-batch, read in this process."""
        return _Reader(self._source, self.order)(next(self._requests(0)))

    def _requests(self, samples: int) -> Iterator[_Request]:
        while True:
            whole = self.order.batch_at(samples)
            low, high = share(whole.start, whole.stop, self._rank, self._world_size)
            for part in range(self.grad_accum_steps):
                start, stop = share(low, high, part, self.grad_accum_steps)
                counts = stop > start
                yield _Request(whole.epoch, *((start, stop) if counts else (whole.start, whole.start + 1)), counts)
            samples += whole.size


class EvalLoader:
    """The evaluation data of one rank: every sample once over all ranks, no padding, unequal shares."""

    def __init__(self, source: DataSource, *, rank: int, world_size: int, batch_size: int) -> None:
        self._source = source
        self._low, self._high = share(0, len(source), rank, world_size)
        self._batch_size = batch_size
        self.num_samples = len(source)

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._low == self._high:  # more ranks than samples: a stand-in, so that all ranks have the same sums to reduce
            yield MicroBatch(self._source.batch(np.zeros(1, np.int64)), counts=False)
        for start in range(self._low, self._high, self._batch_size):
            yield MicroBatch(self._source.batch(np.arange(start, min(start + self._batch_size, self._high))), counts=True)


class _Reader:
    """Reads what is requested, in this process or in a worker."""

    def __init__(self, source: DataSource, order: SampleOrder) -> None:
        self._source = source
        self._order = order
        self._augment = source.augment if isinstance(source, Augmenting) else None

    def __call__(self, request: _Request) -> MicroBatch:
        indices = self._order.indices(request.epoch, request.start, request.stop)
        batch = self._source.batch(indices)
        if self._augment is not None:
            batch = self._augment(batch, self._order.sample_keys(request.epoch, indices))
        return MicroBatch(batch, request.counts)


def require_samples(source: DataSource, *, key: str, at_least: int = 1) -> None:
    """Refuse a data set without samples."""
    if len(source) < at_least:
        raise UserError(key=key, happened=f"the data set has {len(source)} samples", expected=f"at least {at_least}")
