"""Reads micro-batches of a data source, here or in a worker; skips samples that cannot be read; cuts windows of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from ddp_train.errors import DataError, UserError
from ddp_train.hashing import Keys
from ddp_train.interfaces import Batch, Counted, DataSource, Indices
from ddp_train.interfaces.batch import describe, map_tensors, tensors_of
from ddp_train.loader.order import SampleOrder

_TRIES = 100  # samples that are tried in the place of one that cannot be read


class BadSample(NamedTuple):
    sample: int
    why: str


class MicroBatch(NamedTuple):
    """The samples of one forward on one rank.

    A rank without a sample runs a stand-in, of no units (`is_stand_in`), because all ranks must take part in the all-reduce.
    """

    batch: Batch
    is_stand_in: bool = False
    bad_samples: tuple[BadSample, ...] = ()
    on_device: Batch | None = None  # the same batch there, where it was copied ahead
    pieces: int = 1  # rows of the batch that are one sample: windows of tokens may be cut (`LengthPlan`)
    num_samples: int | None = None  # None: its first tensor has a row for each

    def pin_memory(self) -> MicroBatch:
        return self._replace(batch=pin_memory(self.batch))


def as_micro_batch(batch: Batch | Counted, num_asked: int, *, is_stand_in: bool = False, bad: tuple[BadSample, ...] = ()) -> MicroBatch:
    """Return a batch with its number of samples: as many as were asked for, unless its collate says another."""
    batch, num_samples = batch if isinstance(batch, Counted) else (batch, num_asked)
    first = next((tensor for tensor in tensors_of(batch) if tensor.ndim), None)
    has_row_per_sample = first is not None and len(first) == num_samples
    return MicroBatch(batch, is_stand_in, bad, num_samples=None if has_row_per_sample else num_samples)


class TrainRequest(NamedTuple):
    """One micro-batch that is wanted, as positions [start, stop) in an epoch's order; travels to the workers."""

    epoch: int
    start: int
    stop: int
    is_stand_in: bool = False


class EvalRequest(NamedTuple):
    """The samples [start, stop) of the evaluation set; a stand-in when that is empty."""

    start: int
    stop: int


Request = TypeVar("Request", contravariant=True)
BlendFunction = Callable[[Batch, Batch, Keys], Batch]
"""Makes one batch of two, as the keys of its samples say (loader/blend.py)."""


class Reader(Protocol[Request]):
    """Reads the micro-batches of requests of one kind, in this process or in a worker."""

    samples: SampleReader  # reads single samples, too

    def indices(self, request: Request) -> Indices:
        """Return the samples of a request."""

    def __call__(self, request: Request) -> MicroBatch: ...


class TrainReader:
    """Reads the training split. A sample that is skipped is replaced by another one, so that every batch keeps its size.

    Which one is a function of (seed, epoch, index of the bad sample) alone, like everything else about the order.
    """

    def __init__(self, source: DataSource, order: SampleOrder, *, skips_bad_samples: bool, blend: BlendFunction | None = None) -> None:
        self.samples = SampleReader(source)
        self._order, self._blend = order, blend
        self._augments, self._skips_bad_samples = source.augments, skips_bad_samples

    def indices(self, request: TrainRequest) -> Indices:
        return self._order.indices(request.epoch, request.start, request.stop)

    def __call__(self, request: TrainRequest) -> MicroBatch:
        positions = np.arange(request.start, request.stop)
        batch, wanted, skipped = self._read(request.epoch, self.indices(request), positions)
        if self._blend is not None:
            partners, _, _ = self._read(request.epoch, *self._order.partners(request.epoch, positions))
            batch = self._blend(batch, partners, self._order.sample_keys(request.epoch, wanted, positions=positions))
        return as_micro_batch(batch, len(wanted), is_stand_in=request.is_stand_in, bad=() if request.is_stand_in else skipped)

    def of_size(self, size: int) -> MicroBatch:
        lengths = self.samples.source.lengths
        if lengths is None:
            return self(TrainRequest(0, 0, size))
        longest = np.sort(np.argpartition(lengths, -size)[-size:])
        return as_micro_batch(self._read(0, longest, longest)[0], size)

    def _read(self, epoch: int, wanted: Indices, positions: Indices) -> tuple[Batch, Indices, tuple[BadSample, ...]]:
        """Return samples of an epoch, at these positions, as they are trained on; their indices; and those that cannot be read."""
        source = self.samples.source
        source.seed_reads(partial(self._order.sample_keys, epoch))
        skipped: tuple[BadSample, ...] = ()
        if self._skips_bad_samples:
            batch, wanted, skipped = self.samples.read_good(wanted, partial(self._order.replacements, epoch, count=_TRIES))
        else:
            batch = self.samples.read(wanted)
        if self._augments:
            batch = source.augment(batch, self._order.sample_keys(epoch, wanted, positions=positions), wanted)
        return batch, wanted, skipped


class EvalReader:
    """Reads the evaluation split. A sample that is skipped is left out of the sums."""

    def __init__(self, source: DataSource, *, skips_bad_samples: bool) -> None:
        self.samples = SampleReader(source)
        self._skips_bad_samples = skips_bad_samples

    def indices(self, request: EvalRequest) -> Indices:
        return np.arange(request.start, request.stop)

    def __call__(self, request: EvalRequest) -> MicroBatch:
        if not self._skips_bad_samples:
            is_empty = request.start == request.stop
            indices = np.zeros(1, np.int64) if is_empty else self.indices(request)
            return as_micro_batch(self.samples.read(indices), len(indices), is_stand_in=is_empty)
        batch, indices, skipped = self.samples.read_good(self.indices(request))
        if batch is not None:
            return as_micro_batch(batch, len(indices), bad=skipped)
        stand_in, _, _ = self.samples.read_good(np.zeros(1, np.int64), lambda index: np.arange(1, min(_TRIES, len(self.samples.source))))
        return as_micro_batch(stand_in, 1, is_stand_in=True, bad=skipped)


class SampleReader:
    """Reads samples of a source, and knows which of them this process has found to be bad."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self._bad: dict[int, str] = {}

    def where(self, index: int) -> str:
        """Return the file that a sample comes from, as far as the source tells, in brackets."""
        return f" ({place})" if (place := self.source.where(index)) else ""

    def read(self, indices: Indices) -> Batch:
        """Read samples. An error of the source says which sample it is about, where that sample alone raises it."""
        try:
            return self.source.batch(indices)
        except Exception as error:
            for index in map(int, indices):
                try:
                    self.read_alone(index)
                except Exception as sample_error:
                    if not isinstance(sample_error, UserError):  # a UserError says it itself
                        where = f"sample {index}{self.where(index)}"
                        sample_error.add_note(f"{where}; loader.on_bad_sample=skip continues without such samples")
                    raise sample_error from sample_error.__cause__
            raise error

    def read_alone(self, index: int) -> None:
        self.source.batch(np.asarray([index], np.int64))

    def read_good(
        self, indices: Indices, replacements_of: Callable[[int], Indices] | None = None
    ) -> tuple[Batch | None, Indices, tuple[BadSample, ...]]:
        """Read samples; return the batch, its indices, and the bad samples.

        `replacements_of` returns what to try in the place of an index. Without it bad samples are left out. The batch is None: all are bad.
        """
        while True:
            bad = [row for row, index in enumerate(indices.tolist()) if index in self._bad] if self._bad else []
            skipped = tuple(BadSample(index, self._bad[index]) for index in indices[bad].tolist())
            if replacements_of is None:
                chosen = np.delete(indices, bad)
            else:
                chosen = indices.copy()
                chosen[bad] = [self._first_good(index, replacements_of(index)) for index, _ in skipped]
            if not len(chosen):
                return None, chosen, skipped
            try:
                return self.source.batch(chosen), chosen, skipped
            except Exception:
                are_good = [self._is_good(index) for index in chosen.tolist()]
                if all(are_good):
                    raise

    def _first_good(self, index: int, candidates: Indices) -> int:
        for candidate in candidates.tolist():
            if self._is_good(candidate):
                return int(candidate)
        happened = f"sample {index} cannot be read, nor can the {_TRIES} that were tried in its place. {self._bad[index]}"
        fix = "loader.on_bad_sample=raise shows the error itself"
        raise DataError(key="loader.on_bad_sample", happened=happened, expected="a data set with a few bad samples at most", fix=fix)

    def _is_good(self, index: int) -> bool:
        if index not in self._bad:
            try:
                self.read_alone(index)
            except Exception as error:
                self._bad[index] = f"{type(error).__name__}{self.where(index)}: {error}".partition("\n")[0]
        return index not in self._bad


class LengthPlan:
    """How long windows of tokens are at each step: whole, or cut into pieces of one length; a function of the step's number alone.

    A window stays one sample: its pieces are rows of one micro-batch. So nothing else (order, global batch, resume) depends on lengths.

    Args:
        whole: T, which every length divides.
        changes: (step counted from 0, length of the pieces from that step on), ascending; windows are whole before the first one.
    """

    def __init__(self, whole: int, changes: Sequence[tuple[int, int]]) -> None:
        self.whole = whole
        self._steps = [step for step, _ in changes]
        self._lengths = [whole, *(length for _, length in changes)]

    def at(self, step: int) -> int:
        """Return the length in the step that comes after `step` steps."""
        return self._lengths[bisect_right(self._steps, step)]

    def cut(self, micro_batch: MicroBatch, step: int) -> MicroBatch:
        """Return a micro-batch as the step that comes after `step` steps has it: [B, T] becomes [B * pieces, length], without a copy."""
        change = partial(self._pieces, length=self.at(step), micro_batch=micro_batch)
        on_device = None if micro_batch.on_device is None else map_tensors(change, micro_batch.on_device)
        return micro_batch._replace(batch=map_tensors(change, micro_batch.batch), on_device=on_device, pieces=self.whole // self.at(step))

    def _pieces(self, tensor: Tensor, *, length: int, micro_batch: MicroBatch) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != self.whole:
            happened = f"is given, and a batch is {describe(micro_batch.batch)}"
            expected = f"whole windows of {self.whole} tokens alone, [B, {self.whole}]"
            raise DataError(key="trainer.length_schedule", happened=happened, expected=expected, fix="trainer.length_schedule=null")
        return tensor.reshape(-1, length, *tensor.shape[2:])
