"""A look into batches, whatever they are made of.

Shapes: B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

Batch = Any
"""Tensors nested in tuples, lists or dicts, as a rule with a leading dimension B; usually `(inputs, targets)`."""


class Counted(NamedTuple):
    """What a collate returns that drops or repeats samples: its batch, and how many samples that has.

    Of any other batch the loader knows it: as many as it has asked for.
    """

    batch: Batch
    num_samples: int


_SHOWN = 8  # parts of a nest, names of parameters


def batch_size(batch: Batch) -> int:
    """Return the number of samples B: the first dimension of the first tensor, unless `note_size` said another. Never reads the device.

    Raises:
        TypeError: the batch holds no tensor with a leading dimension.
    """
    if _noted is not None:
        return _noted
    first = batch
    while type(first) in (tuple, list) and first:  # in nearly all batches what comes first is a tensor: asked for several times a step
        first = first[0]
    for tensor in (first,) if isinstance(first, Tensor) and first.ndim > 0 else tensors_of(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TypeError(f"a batch is tensors with a leading dimension B in tuples, lists or dicts; found none in a {type(batch).__name__}")


_noted: int | None = None


def note_size(batch: Batch, num_samples: int | None) -> Batch:
    """Return the batch that is worked on from now on, and note its number of samples where its tensors do not tell it: of a jagged one.

    Not noted at the batch itself: a strategy may hand on another nest of the same tensors, as DDP does on GPUs.

    Args:
        num_samples: None: its tensors tell it.
    """
    global _noted
    _noted = num_samples
    return batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of the nest, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
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
        return f"{name}{{{few([f'{key}: {describe(each)}' for key, each in value.items()])}}}"
    if isinstance(value, (tuple, list)):
        return f"{name}({few([describe(each) for each in value])})"
    return "None" if value is None else f"a {name}"


def few(texts: list[str]) -> str:
    return ", ".join(texts[:_SHOWN] + ["..."] * (len(texts) > _SHOWN))
