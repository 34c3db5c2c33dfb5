"""Batches, whatever they are made of: their tensors, their size, and how they are described; and images on their way to a device.

Images go there as bytes (`Pixels`), and are normalised and mixed where they arrive.

Shapes: B samples in a batch, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_train.errors import join_few

Batch = Any
"""Tensors nested in tuples, lists or dicts, as a rule with a leading dimension B; usually `(inputs, targets)`.
No union: the model and the objective know which it is, and each `inputs, targets = batch` of theirs would need a cast."""

_num_samples: ContextVar[int | None] = ContextVar("num_samples", default=None)


class Counted(NamedTuple):
    """What a collate returns that drops or repeats samples: its batch, and how many samples that has.

    Of any other batch the loader knows it: as many as it has asked for.
    """

    batch: Batch
    num_samples: int


@contextmanager
def given_batch_size(num_samples: int | None) -> Iterator[None]:
    """Let `batch_size` return this number within: of a batch whose tensors do not tell it, a jagged one. None: they do.

    The batch itself cannot carry it: a strategy may hand on another nest of the same tensors, as DDP does on GPUs.
    """
    outer = _num_samples.set(num_samples)
    try:
        yield
    finally:
        _num_samples.reset(outer)


def batch_size(batch: Batch) -> int:
    """Return B: the first dimension of the first tensor (or a TypeError), or the `given_batch_size`. Never reads the device."""
    if (num_samples := _num_samples.get()) is not None:
        return num_samples
    first = batch
    while type(first) in (tuple, list) and first:  # in nearly all batches what comes first is a tensor: asked for several times a step
        first = first[0]
    for tensor in (first,) if isinstance(first, Tensor) and first.ndim > 0 else tensors_of(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TypeError(f"a batch is tensors with a leading dimension B in tuples, lists or dicts; found none in a {type(batch).__name__}")


def call_model(model: Callable[..., Any], inputs: Batch) -> Any:
    """Return a model's outputs for inputs: a tensor, or a tuple or a dict of its arguments."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


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


class Mix(NamedTuple):
    """Each image's partner, and how much of which is taken (`loader.mixup_alpha`, `loader.cutmix_alpha`)."""

    others: Tensor  # [B, C, H, W]
    shares: Tensor  # float32 [B]: how much of each pixel is the sample's own
    boxes: Tensor | None = None  # int64 [B, 4]: from which row to which, from which column to which the partner is instead; None: nowhere
    is_cut: Tensor | None = None  # bool [B]: by its box, and not by its share


class Pixels(NamedTuple):
    """A batch of images that are not normalised yet: `image * scale + offset`, in float32, is what the model gets."""

    images: Tensor  # uint8 [B, C, H, W]
    labels: Tensor | None  # [B], or class shares [B, K]; None: a batch is the images alone
    scale: tuple[float, ...]  # one for each channel
    offset: tuple[float, ...]
    mix: Mix | None = None


def normalise_and_mix(batch: Batch) -> Batch:
    """Return a batch as a model gets it, on the device where it is: images normalised, and mixed. Any other batch is what it was."""
    if not isinstance(batch, Pixels):
        return batch
    images = _normalised(batch.images, batch)
    if batch.mix is not None:
        images = torch.lerp(_normalised(batch.mix.others, batch), images, pixel_shares(batch.mix, images))
    return images if batch.labels is None else (images, batch.labels)


def as_pair(batch: Batch) -> Batch:
    """Return a batch of the same form and shapes as `normalise_and_mix` would give, without the work."""
    if not isinstance(batch, Pixels):
        return batch
    return batch.images if batch.labels is None else (batch.images, batch.labels)


def pixel_shares(mix: Mix, images: Tensor) -> Tensor:
    """Return the weight of the sample itself at each place, as float32 that spreads over `images`."""
    shares = mix.shares.view(-1, *[1] * (images.ndim - 1))
    if mix.boxes is None or mix.is_cut is None:
        return shares
    top, bottom, left, right = (side[:, None] for side in mix.boxes.unbind(1))
    rows, columns = (torch.arange(size, device=images.device) for size in images.shape[2:])
    is_inside = ((rows >= top) & (rows < bottom))[:, None, :, None] & ((columns >= left) & (columns < right))[:, None, None, :]
    return torch.where(mix.is_cut.view(-1, 1, 1, 1), (~is_inside).float(), shares)


def _normalised(images: Tensor, batch: Pixels) -> Tensor:
    scale, offset = (_per_channel(tuple(values), images.device) for values in (batch.scale, batch.offset))
    return images.to(torch.float32).mul_(scale).add_(offset)


@lru_cache(maxsize=64)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return one value for each channel, kept on the device: copied there for each batch it would hold up the host."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
