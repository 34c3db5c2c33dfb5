"""A rank's micro-batches, in the global order; and a rank's share of the evaluation set."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cache
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Generic

import torch

from ddp_train.errors import DataError, RunError, UserError
from ddp_train.interfaces import DataSource, Indices
from ddp_train.interfaces.batch import map_tensors
from ddp_train.loader.order import BatchOrder, SampleOrder, share
from ddp_train.loader.reader import BlendFunction, EvalReader, EvalRequest, MicroBatch, Reader, Request, TrainReader, TrainRequest

if TYPE_CHECKING:
    from ddp_train.loader.worker_pool import WorkerDied

logger = logging.getLogger(__name__)


class TrainLoader(ABC):
    """The training data of one rank as the loop uses it, with positions or without. A `position` counts samples of the run."""

    num_samples: int | None  # of the data set; None: a stream that does not say
    order: BatchOrder
    grad_accum_steps: int  # micro-batches of a step, at most
    skips_bad_samples = False  # samples that cannot be read
    source: DataSource | None = None  # of data with positions

    @abstractmethod
    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches for ever, from the step that begins at `position`."""

    def num_micro_batches(self, position: int) -> int:
        """Return how many micro-batches the step that begins at `position` has."""
        return self.grad_accum_steps

    @abstractmethod
    def peek(self) -> MicroBatch:
        """Return this rank's very first micro-batch, read in this process."""

    @abstractmethod
    def of_size(self, size: int) -> MicroBatch:
        """Return so many samples as one micro-batch, read in this process: the longest ones where the data tells lengths."""

    def sample_ids(self, position: int, number: int) -> Indices | None:
        """Return the samples in this rank's micro-batch `number` of the step at `position`; None: they have no numbers."""
        return None

    def place(self, position: int, number: int) -> int | None:
        """Return where in the run micro-batch `number` of the step at `position` begins on this rank, in samples; None: not known."""
        return None

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return this rank's state after the step that ended at `position`: plain containers and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most have no state)
        """Go on from that state, on the same number of ranks."""

    def samples_by_source(self, position: int) -> dict[str, int]:
        """Return how many of the samples before `position` are of each source of a mixture; {}: no mixture, or it cannot be told."""
        return {}

    def caveats(self, position: int) -> list[str]:
        """Return a line for each guarantee that this data lacks in a run that goes on at `position`."""
        return []


class EvaluationLoader(ABC):
    """The evaluation data of one rank: iterated over once for each evaluation; at least one micro-batch."""

    skips_bad_samples = False  # samples that cannot be read
    source: DataSource | None = None  # of data with positions

    @abstractmethod
    def __iter__(self) -> Iterator[MicroBatch]: ...

    @abstractmethod
    def peek(self) -> MicroBatch | None:
        """Return this rank's first micro-batch, and leave the next evaluation as it would be; None: that cannot be."""

    def sample_ids(self, number: int) -> Indices | None:
        """Return the samples in this rank's micro-batch `number`; None: they have no numbers."""
        return None


class PositionedTrainLoader(TrainLoader):
    """The training data of one rank, with positions: seeking is O(1), and the position is all of its state.

    Args:
        world_size: ranks that share each global batch.
        grad_accum_steps: micro-batches of each rank in a step.
        num_micro_batches_of: micro-batches of a step by the size of its global batch, where that changes; None: always `grad_accum_steps`.
        num_workers: processes that read ahead; 0 reads in this one. What they read ahead is not counted as trained on.
        pin_memory: copy batches to page-locked memory, for faster transfer to a GPU.
        skips_bad_samples: replace samples that cannot be read, instead of raising what they raise.
        samples_by_source: of a mixture; counts the samples before a position.
        blend: makes one sample of two (mixup, CutMix).
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
        skips_bad_samples: bool = False,
        num_micro_batches_of: Callable[[int], int] | None = None,
        samples_by_source: Callable[[int], dict[str, int]] | None = None,
        blend: BlendFunction | None = None,
    ) -> None:
        self.source, self.order = source, order
        self.num_samples = len(source)
        self.skips_bad_samples = skips_bad_samples
        self.grad_accum_steps = grad_accum_steps
        self._rank, self._world_size = rank, world_size
        self._samples_by_source = samples_by_source
        self._num_micro_batches = cache(num_micro_batches_of or (lambda size: grad_accum_steps))  # by the size of the global batch
        self._reader = TrainReader(source, order, skips_bad_samples=skips_bad_samples, blend=blend)
        self._fetcher = _Fetcher(self._reader, num_workers=num_workers, pin_memory=pin_memory)

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        return self._fetcher.fetch_all(self._requests(position))

    def num_micro_batches(self, position: int) -> int:
        return self._num_micro_batches(self.order.batch_at(position).size) if self.grad_accum_steps > 1 else 1

    def peek(self) -> MicroBatch:
        return self._fetcher.fetch_here(next(self._requests(0)))

    def of_size(self, size: int) -> MicroBatch:
        return self._reader.of_size(size)

    def sample_ids(self, position: int, number: int) -> Indices | None:
        return self._reader.indices(next(islice(self._requests(position), number, None)))

    def place(self, position: int, number: int) -> int:
        return position + self._slices(self.order.batch_at(position).size)[number][0]

    def samples_by_source(self, position: int) -> dict[str, int]:
        return self._samples_by_source(position) if self._samples_by_source is not None else {}

    def _requests(self, position: int) -> Iterator[TrainRequest]:
        slices = cache(self._slices)
        while True:
            batch = self.order.batch_at(position)
            for low, high, is_stand_in in slices(batch.size):
                yield TrainRequest(batch.epoch, batch.start + low, batch.start + high, is_stand_in)
            position += batch.size

    def _slices(self, size: int) -> list[tuple[int, int, bool]]:
        """Return which samples of a global batch each micro-batch of this rank has, and whether it is a stand-in."""
        num_micro_batches = self._num_micro_batches(size)
        low, high = share(0, size, self._rank, self._world_size)
        slices = []
        for number in range(num_micro_batches):
            start, stop = share(low, high, number, num_micro_batches)
            slices.append((start, stop, False) if stop > start else (0, 1, True))
        return slices


class OneBatchTrainLoader(TrainLoader):
    """Gives this rank's micro-batches of a loader's first step in every step (`debug.overfit`): the same tensors, augmented once.

    The loader's batches all have one size (`drop_last`). It counts steps and epochs, so that schedules are those of the whole run.
    """

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader
        self.num_samples, self.order, self.source = loader.num_samples, loader.order, loader.source
        self.grad_accum_steps = loader.grad_accum_steps
        self.skips_bad_samples = loader.skips_bad_samples

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        first = list(islice(self._loader.micro_batches(0), self.grad_accum_steps))
        for micro_batch in cycle(first):
            yield micro_batch._replace(batch=map_tensors(torch.clone, micro_batch.batch))  # a model may change its inputs in place

    def peek(self) -> MicroBatch:
        return self._loader.peek()

    def of_size(self, size: int) -> MicroBatch:
        return self._loader.of_size(size)

    def sample_ids(self, position: int, number: int) -> Indices | None:
        return self._loader.sample_ids(0, number)

    def place(self, position: int, number: int) -> int | None:
        return self._loader.place(position, number)

    def caveats(self, position: int) -> list[str]:
        return ["debug.overfit: the first global batch is trained on, again and again"]


class PositionedEvaluationLoader(EvaluationLoader):
    """The evaluation data of one rank: every sample once over all ranks, no padding, unequal shares.

    Args: as for `PositionedTrainLoader`; samples that are skipped are left out.
        max_samples: only so many samples are taken, the first ones; None: all.
    """

    source: DataSource

    def __init__(
        self,
        source: DataSource,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        skips_bad_samples: bool = False,
        max_samples: int | None = None,
    ) -> None:
        self.source, self._batch_size = source, batch_size
        self.skips_bad_samples = skips_bad_samples
        self.num_samples = len(source) if max_samples is None else min(max_samples, len(source))
        self.first, self._stop = share(0, self.num_samples, rank, world_size)  # this rank's samples
        self._reader = EvalReader(source, skips_bad_samples=skips_bad_samples)
        self._fetcher = _Fetcher(self._reader, num_workers=num_workers, pin_memory=pin_memory)

    def __len__(self) -> int:
        return max(1, -(-(self._stop - self.first) // self._batch_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._fetcher.fetch_all(self._requests())

    def peek(self) -> MicroBatch:
        """Return this rank's first micro-batch, read where it will be read: a worker must be able to."""
        return self._fetcher.fetch_one(next(self._requests()))

    def sample_ids(self, number: int) -> Indices:
        return self._reader.indices(next(islice(self._requests(), number, None)))

    def _requests(self) -> Iterator[EvalRequest]:
        if self.first == self._stop:  # more ranks than samples: a stand-in, so that all ranks have the same sums to reduce
            yield EvalRequest(0, 0)
        for start in range(self.first, self._stop, self._batch_size):
            yield EvalRequest(start, min(start + self._batch_size, self._stop))


class _Fetcher(Generic[Request]):
    """Gets the micro-batches of requests from a reader: in this process, or from workers that read ahead."""

    def __init__(self, reader: Reader[Request], *, num_workers: int, pin_memory: bool) -> None:
        self._reader = reader
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._known_bad: set[int] = set()

    def fetch_here(self, request: Request) -> MicroBatch:
        micro_batch = self._reader(request)
        return micro_batch.pin_memory() if self._pin_memory else micro_batch

    def fetch_one(self, request: Request) -> MicroBatch:
        (micro_batch,) = [self.fetch_here(request)] if self._num_workers == 0 else self._by_workers(iter([request]), num_workers=1)
        return micro_batch

    def fetch_all(self, requests: Iterator[Request]) -> Iterator[MicroBatch]:
        micro_batches = self._by_workers(requests, num_workers=self._num_workers) if self._num_workers else map(self.fetch_here, requests)
        for micro_batch in micro_batches:
            for bad in micro_batch.bad_samples:
                if bad.sample not in self._known_bad:
                    self._known_bad.add(bad.sample)
                    logger.warning("sample %d is skipped: %s", bad.sample, bad.why)
            yield micro_batch

    def _by_workers(self, requests: Iterator[Request], *, num_workers: int) -> Iterator[MicroBatch]:
        from ddp_train.loader.worker_pool import WorkerDied, WorkerPool  # imported when the server of workers was started

        with closing(WorkerPool([self._reader] * num_workers, pin_memory=self._pin_memory)) as workers:
            try:
                yield from workers.results(requests)
            except WorkerDied as death:
                raise self._explain(death) from None

    def _explain(self, death: WorkerDied) -> UserError:
        """Find out which sample kills a worker, by reading the samples of the request one by one in a new one."""
        from ddp_train.loader.worker_pool import WorkerDied, WorkerPool

        indices = self._reader.indices(death.request).tolist()
        with closing(WorkerPool([self._reader.samples.read_alone])) as workers:
            try:
                list(workers.results(iter(indices)))
            except WorkerDied as second:
                index = second.request
                happened = f"sample {index}{self._reader.samples.where(index)} ends the process that reads it: it {second.how()}"
                return DataError(key="data", happened=happened, expected="samples that can be read", fix="repair or remove it")
            except Exception as error:  # reported like any other, had the process lived
                logger.info("reading again what the worker was reading: %r", error)
        happened = f"a loader worker (pid {death.pid}) {death.how()} while it read the samples {indices}; they can be read"
        fix = "fewer loader.num_workers, if memory is the cause: each needs some; loader.num_workers=0 needs none"
        return RunError(key="loader.num_workers", happened=happened, expected="workers that live as long as the run", fix=fix)


def require_samples(source: DataSource, *, key: str, at_least: int = 1) -> None:
    if len(source) < at_least:
        raise UserError(key=key, happened=f"the data set has {len(source)} samples", expected=f"at least {at_least}")
