"""Look into a batch. Same layer as `interfaces`: objectives and the trainer both use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ddp_train.interfaces import Batch


def batch_size(batch: Batch) -> int:
    """Return the number of samples B: the first dimension of the first tensor in the nest. Reads shapes only, never the device.

    Raises:
        TypeError: the batch holds no tensor with a leading dimension.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TypeError(f"a batch is tensors with a leading dimension B in tuples, lists or dicts; found none in a {type(batch).__name__}")


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
