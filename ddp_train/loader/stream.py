"""Loaders of a stream (`dataset_adapter.Stream`): samples that come one after another and have no positions.

Every rank reads shards of its own, so the size of a global batch is fixed, but which samples are in it depends on the number of ranks and
workers. The dataset's own `state_dict`, where it has one, is what a checkpoint holds instead of a position.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from torch import Tensor

from ddp_train.errors import DataError
from ddp_train.interfaces import Batch
from ddp_train.loader.dataset_adapter import Stream, comes_from
from ddp_train.loader.loader import EvaluationLoader, TrainLoader
from ddp_train.loader.order import BatchOrder, share
from ddp_train.loader.reader import MicroBatch, as_micro_batch
from ddp_train.loader.worker_pool import WorkerDied, WorkerPool

_KEPT_STEPS = 16  # more than are under way between the readers and the optimizer, which may be a few behind


class StreamTrainLoader(TrainLoader):
    """The training data of one rank, from a stream. Each worker reads a shard of its own, again from its start when it ends.

    Args: as for `PositionedTrainLoader`, with a stream as the training split and `order` for the size of the global batches.
    """

    def __init__(
        self, stream: Stream, order: BatchOrder, *, rank: int, world_size: int, grad_accum_steps: int, num_workers: int, pin_memory: bool
    ) -> None:
        self._stream, self.order, self.grad_accum_steps = stream, order, grad_accum_steps
        self.num_samples = stream.length
        self._num_readers, self._num_workers, self._pin_memory = max(num_workers, 1), num_workers, pin_memory
        self._first_reader, self._all_readers = rank * self._num_readers, world_size * self._num_readers
        low, high = share(0, order.global_batch_size, rank, world_size)
        bounds = [share(low, high, number, grad_accum_steps) for number in range(grad_accum_steps)]
        self._sizes = [stop - start for start, stop in bounds]  # those of 0 samples come last
        self._keeps_state = stream.has_state
        self._loaded: list[tuple[int, Any]] | None = None
        self._passed: deque[tuple[int, list[tuple[int, bytes | None]]]] = deque(maxlen=_KEPT_STEPS)

    def micro_batches(self, position: int) -> Iterator[MicroBatch]:
        """Yield micro-batches from the loaded state on, or else from the stream's start."""
        start = self._loaded or [(number, None) for number in range(self._num_readers)]
        readers = [self._reader(number, state) for number, state in start]
        reader_queue = deque((number, pickle.dumps(state) if state else None) for number, state in start)  # the next reader comes first
        num_read = sum(size > 0 for size in self._sizes)
        # The state after each reader's last micro-batch of a step is what a checkpoint may need.
        requests = [_Request(size, micro_step >= num_read - self._num_readers) for micro_step, size in enumerate(self._sizes[:num_read])]
        workers = WorkerPool(readers, pin_memory=self._pin_memory) if self._num_workers else None
        results = workers.results(cycle(requests)) if workers else map(readers[0], cycle(requests))
        try:
            while True:
                position += self.order.global_batch_size
                for request in requests:
                    batch, state = next(results)
                    number, last_kept = reader_queue.popleft()
                    if request.keeps_position:
                        self._note(state)
                    reader_queue.append((number, state if request.keeps_position else last_kept))
                    if request is requests[-1]:
                        self._passed.append((position, list(reader_queue)))
                    micro_batch = as_micro_batch(batch, request.size)
                    if self._pin_memory and workers is None:
                        micro_batch = micro_batch.pin_memory()
                    yield micro_batch
                for _ in range(self.grad_accum_steps - num_read):  # a rank has a sample of each step at least, not of each micro-step
                    yield micro_batch._replace(is_stand_in=True)
        except WorkerDied as error:
            happened = f"a loader worker (pid {error.pid}) {error.how()} while it read its part of the stream"
            fix = "fewer loader.num_workers, if memory is the cause; loader.num_workers=0 shows an error of the data itself"
            raise DataError(key="loader.num_workers", happened=happened, expected="workers that live as long as the run", fix=fix) from None
        finally:
            if workers is not None:
                workers.close()

    def peek(self) -> MicroBatch:
        return self.of_size(self._sizes[0])

    def of_size(self, size: int) -> MicroBatch:
        reader = self._reader(0, None)
        with suppress(Exception):  # one that cannot be copied is read itself
            reader = copy.deepcopy(reader)
        return as_micro_batch(reader(_Request(size, keeps_position=False))[0], size)

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the readers' positions after the step that ended at `position`, whatever was read since; {}: not known."""
        passed = dict(self._passed).get(position)
        if passed is None or not self._keeps_state:
            return {}
        return {"readers": [[number, pickle.loads(state) if state else None] for number, state in passed]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        readers = [(int(number), reader_state) for number, reader_state in state.get("readers", [])]
        self._loaded = readers if len(readers) == self._num_readers and self._stream.has_state else None

    def caveats(self, position: int) -> list[str]:
        dataset = self._stream.dataset
        name = type(dataset).__name__
        caveats = []
        if self._all_readers > 1:
            caveats.append("a stream: which samples are in a batch depends on the number of ranks and loader.num_workers")
        if reads_all(dataset, self._all_readers):
            caveats.append(f"each of {self._all_readers} readers reads all of {name} and keeps one sample in {self._all_readers}")
        if position and self._loaded is None:
            caveats.append("the stream starts over: the checkpoint has no state for this number of ranks and workers; samples may repeat")
        elif not self._stream.has_state:
            caveats.append(f"{name} has no state_dict and load_state_dict: after a resume samples may repeat or be skipped")
        if comes_from(dataset, "datasets") and _shuffles_in_a_buffer(dataset):
            caveats.append("Hugging Face keeps no shuffle buffer in its state: after a resume the samples that were in it are skipped")
        return caveats

    def _note(self, position: bytes | None) -> None:
        if self._keeps_state and position is None:
            self._keeps_state = False
            if self._first_reader == 0:
                what = f"the state of {type(self._stream.dataset).__name__} is not saved, it has more than tensors and plain containers"
                print(f"data     {what}: after a resume the stream starts over", flush=True)

    def _reader(self, number: int, position: Any) -> _StreamReader:
        return _StreamReader(self._stream, self._first_reader + number, self._all_readers, position)


class StreamEvaluationLoader(EvaluationLoader):
    """The evaluation data of one rank: each sample of one pass once over all ranks, no padding. The stream must end.

    Args: as for `PositionedEvaluationLoader`.
    """

    def __init__(self, stream: Stream, *, rank: int, world_size: int, batch_size: int, max_samples: int | None = None) -> None:
        self._stream, self._rank, self._world_size, self._batch_size = stream, rank, world_size, batch_size
        low, high = share(0, max_samples or 0, rank, world_size)
        self._max_samples = None if max_samples is None else high - low

    def __iter__(self) -> Iterator[MicroBatch]:
        samples = islice(self._samples(self._rank), self._max_samples)
        is_empty = True
        while batch := list(islice(samples, self._batch_size)):
            is_empty = False
            yield as_micro_batch(self._stream.collate(batch), len(batch))
        if is_empty:  # fewer samples than ranks: a stand-in, so that all ranks have the same sums to reduce
            first = list(islice(self._samples(0), 1))
            if not first:
                raise DataError(key="data.eval", happened="the stream gave no sample", expected="at least 1")
            yield as_micro_batch(self._stream.collate(first), 1, is_stand_in=True)

    def peek(self) -> MicroBatch | None:
        """Return this rank's first micro-batch, of a copy; None where a stream that cannot be copied gives its samples only once."""
        try:
            stream = copy.deepcopy(self._stream)
        except Exception:
            stream = self._stream
            if isinstance(stream.dataset, Iterator):
                return None
        return next(iter(StreamEvaluationLoader(stream, rank=self._rank, world_size=self._world_size, batch_size=self._batch_size)))

    def _samples(self, rank: int) -> Iterator[Any]:
        return shard(self._stream.dataset, rank, self._world_size).samples()


class _Request(NamedTuple):
    """Samples that are wanted of a reader; travels to the workers."""

    size: int
    keeps_position: bool


class _StreamReader:
    """Reads one shard, pass after pass, in this process or in a worker.

    Args:
        number: of the shard.
        count: shards in all.
        position: where to go on; None: at the start.
    """

    def __init__(self, stream: Stream, number: int, count: int, position: Any) -> None:
        self._stream, self._number, self._count, self._position = stream, number, count, position
        self._pass = 0
        self._samples: Iterator[Any] | None = None

    def __call__(self, request: _Request) -> tuple[Batch, bytes | None]:
        """Return the next samples and the position after them, as a pickle, which costs little on its way; None: none is kept."""
        if self._samples is None:
            self._shard = shard(self._stream.dataset, self._number, self._count)
            self._samples = self._all_samples()
        batch = self._stream.collate(list(islice(self._samples, request.size)))
        if not request.keeps_position or not self._stream.has_state:
            return batch, None
        state = self._shard.dataset.state_dict()
        return batch, pickle.dumps({"pass": self._pass, "dataset": state}) if _fits_checkpoint(state) else None

    def _all_samples(self) -> Iterator[Any]:
        dataset, position = self._shard.dataset, self._position
        self._pass = position["pass"] if position else 0
        while True:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(self._pass)
            if position:
                dataset.load_state_dict(position["dataset"])
            is_empty = position is None
            for sample in self._shard.samples(is_resumed=position is not None):
                is_empty = False
                yield sample
            if is_empty:
                happened = f"the stream has no sample for reader {self._number + 1} of {self._count} (pass {self._pass + 1})"
                expected = "at least one sample for each worker of each rank, in every pass"
                fix = "fewer loader.num_workers or ranks, or data in more files"
                raise DataError(key="data", happened=happened, expected=expected, fix=fix)
            self._pass, position = self._pass + 1, None


def _fits_checkpoint(state: Any) -> bool:
    """Tell whether a checkpoint can hold it: reading one executes nothing, so it has tensors and plain containers only."""
    if type(state) in (dict, list, tuple):
        return all(_fits_checkpoint(part) for part in (chain(state, state.values()) if type(state) is dict else state))
    return type(state) in (int, float, bool, str, bytes, type(None), Tensor)


def _shuffles_in_a_buffer(dataset: Any) -> bool:
    layer = getattr(dataset, "_ex_iterable", None)
    while layer is not None and "BufferShuffled" not in type(layer).__name__:
        layer = getattr(layer, "ex_iterable", None)
    return layer is not None


@dataclass(frozen=True)
class StreamShard:
    """One of the disjoint parts of a stream: every `step`-th sample of `dataset`, from the one at `start` on."""

    dataset: Any
    start: int = 0
    step: int = 1

    def samples(self, *, is_resumed: bool = False) -> Iterator[Any]:
        """Iterate once over the shard; where it is resumed, the dataset goes on after a sample of this shard."""
        return islice(iter(self.dataset), self.step - 1 if is_resumed else self.start, None, self.step)


def shard(dataset: Any, index: int, count: int) -> StreamShard:
    """Return shard `index` of `count`. Together they have every sample of one pass once, where a pass is the same wherever it is read.

    In this order: Hugging Face's own split, WebDataset's (its tar files), the dataset's `shard(num_shards, index)`, and every `count`-th
    sample of the plain iterator, which is correct and reads everything `count` times.
    """
    if count == 1:
        return StreamShard(dataset)
    if comes_from(dataset, "datasets"):
        from datasets.distributed import split_dataset_by_node

        return StreamShard(split_dataset_by_node(dataset, rank=index, world_size=count))
    if _splits_its_shards(dataset):
        return StreamShard(_with_splitter(dataset, index, count))
    if hasattr(dataset, "shard"):
        return StreamShard(dataset.shard(num_shards=count, index=index))
    return StreamShard(dataset, start=index, step=count)


def reads_all(dataset: Any, count: int) -> bool:
    """Tell whether each of `count` shards takes reading the whole stream."""
    if count == 1 or _splits_its_shards(dataset):
        return False
    if comes_from(dataset, "datasets"):
        return bool(dataset.num_shards % count)
    return not hasattr(dataset, "shard")


def _splits_its_shards(dataset: Any) -> bool:
    """Tell whether a WebDataset pipeline has one of the library's stages that give each node some of the tar files."""
    if not comes_from(dataset, "webdataset") or not isinstance(getattr(dataset, "pipeline", None), list):
        return False
    from webdataset.shardlists import single_node_only, split_by_node

    return any(stage in (single_node_only, split_by_node) for stage in dataset.pipeline if callable(stage))


def _with_splitter(dataset: Any, index: int, count: int) -> Any:
    """Return the pipeline with our numbers in place of those that its splitters take from the environment."""
    from webdataset.shardlists import single_node_only, split_by_node, split_by_worker

    changed, stages, splitters = copy.copy(dataset), list(dataset.pipeline), (single_node_only, split_by_node)
    first = next(place for place, stage in enumerate(stages) if stage in splitters)
    stages[first] = partial(_every_nth, index=index, count=count)
    changed.pipeline = [stage for stage in stages if stage not in (*splitters, split_by_worker)]
    return changed


def _every_nth(source: Any, *, index: int, count: int) -> Iterator[Any]:
    return islice(source, index, None, count)
