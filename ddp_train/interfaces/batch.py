"""Batches, whatever they are made of: their tensors, their size, and how they are described. B samples are in a batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ddp_train.errors import join_few

Batch = Any
"""Tensors nested in tuples, lists or dicts, as a rule with a leading dimension B; usually `(inputs, targets)`."""

_num_samples: ContextVar[int | None] = ContextVar("num_samples", default=None)


class Counted(NamedTuple):
    """What a collate returns that drops or repeats samples: its batch, and how many samples that has.

    Of any other batch the loader knows it: as many as it has asked for.
    """

    batch: Batch
    num_samples: int


@contextmanager
def counted_as(num_samples: int | None) -> Iterator[None]:
    """Let `batch_size` return this number within: of a batch whose tensors do not tell it, a jagged one. None: they do.

    The batch itself cannot carry it: a strategy may hand on another nest of the same tensors, as DDP does on GPUs.
    """
    outer = _num_samples.set(num_samples)
    try:
        yield
    finally:
        _num_samples.reset(outer)


def batch_size(batch: Batch) -> int:
    """Return B: the first dimension of the first tensor (or a TypeError), unless it is `counted_as` another. Never reads the device."""
    if (num_samples := _num_samples.get()) is not None:
        return num_samples
    first = batch
    while type(first) in (tuple, list) and first:  # in nearly all batches what comes first is a tensor: asked for several times a step
        first = first[0]
    for tensor in (first,) if isinstance(first, Tensor) and first.ndim > 0 else tensors_of(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TypeError(f"a batch is tensors with a leading dimension B in tuples, lists or dicts; found none in a {type(batch).__name__}")


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of the nest, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(value)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the same nest with every tensor changed. Mappings become dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(change, value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        changed = [map_tensors(change, value) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)  # a named tuple takes its fields one by one
    return batch


def describe(value: Any) -> str:
    """Return types and shapes for a person: `(float32 [32, 3, 8, 8], int64 [32])`."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = "" if type(value) in (dict, tuple, list) else type(value).__name__
    if isinstance(value, Mapping):
        return f"{name}{{{join_few([f'{key}: {describe(each)}' for key, each in value.items()])}}}"
    if isinstance(value, (tuple, list)):
        return f"{name}({join_few([describe(each) for each in value])})"
    return "None" if value is None else f"a {name}"
