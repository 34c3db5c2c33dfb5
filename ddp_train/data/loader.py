"""A rank's micro-batches, in the global order; and a rank's share of the evaluation set."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from ddp_train.data.order import SampleOrder, share
from ddp_train.errors import UserError
from ddp_train.interfaces import Augmenting, Batch, DataSource, Indices
from ddp_train.process import STOP_SIGNALS, die_with_parent


@dataclass(frozen=True)
class MicroBatch:
    """What one rank feeds to one forward.

    `counts` is False for a stand-in: a rank without a sample of its own runs another's with weight zero, because all ranks must take
    part in the all-reduce.
    """

    batch: Batch
    counts: bool

    def pin_memory(self) -> MicroBatch:
        """Return a copy in page-locked memory (torch's DataLoader calls this too)."""
        return MicroBatch(pin_memory(self.batch), self.counts)


@dataclass(frozen=True)
class _Request:
    """One micro-batch that is wanted; travels to the loader's workers."""

    epoch: int
    indices: Indices
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
        requests = self._requests(samples)
        if self._num_workers == 0:
            reader = _Reader(self._source, self.order)
            return (reader[request].pin_memory() if self._pin_memory else reader[request] for request in requests)
        loader: DataLoader[MicroBatch] = DataLoader(
            _Reader(self._source, self.order),  # type: ignore[arg-type]  # it is read by request, not by index
            sampler=_Requests(requests),
            batch_size=None,  # a request is a batch already
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # else the loader draws from the global stream, and resuming would shift it
        )
        return iter(loader)

    def peek(self) -> MicroBatch:
        """Return this rank's very first micro-batch, read in this process."""
        return _Reader(self._source, self.order)[next(self._requests(0))]

    def _requests(self, samples: int) -> Iterator[_Request]:
        while True:
            whole = self.order.batch_at(samples)
            low, high = share(whole.start, whole.stop, self._rank, self._world_size)
            for part in range(self.grad_accum_steps):
                start, stop = share(low, high, part, self.grad_accum_steps)
                counts = stop > start
                indices = self.order.indices(whole.epoch, *((start, stop) if counts else (whole.start, whole.start + 1)))
                yield _Request(whole.epoch, indices, counts)
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
    """Reads requests; the data set that the loader's workers see."""

    def __init__(self, source: DataSource, order: SampleOrder) -> None:
        self._source = source
        self._order = order
        self._augment = source.augment if isinstance(source, Augmenting) else None

    def __getitem__(self, request: _Request) -> MicroBatch:
        batch = self._source.batch(request.indices)
        if self._augment is not None:
            batch = self._augment(batch, self._order.sample_keys(request.epoch, request.indices))
        return MicroBatch(batch, request.counts)


class _Requests(Iterable[_Request]):
    def __init__(self, requests: Iterator[_Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[_Request]:
        return self._requests


def _start_worker(worker: int) -> None:
    """Tie a worker to its rank, and give python's and numpy's streams the seed that torch has there."""
    rank = multiprocessing.parent_process()
    die_with_parent(None if rank is None else rank.pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # an agent sends them to the rank's whole process group; the rank reads on until it stops
    random.seed(torch.initial_seed())
    np.random.seed(torch.initial_seed() % 2**32)


def require_samples(source: DataSource, *, key: str, at_least: int = 1) -> None:
    """Refuse a data set without samples."""
    if len(source) < at_least:
        raise UserError(key=key, happened=f"the data set has {len(source)} samples", expected=f"at least {at_least}")
