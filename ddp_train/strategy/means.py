"""Tensors that travel together, many in one message; and their mean over the ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 25 << 20  # bytes that travel together
_K = TypeVar("_K")


def means(tensors: Mapping[_K, Tensor], since: Mapping[_K, Tensor] = MappingProxyType({})) -> Iterator[tuple[_K, Tensor]]:
    """Yield the mean over the ranks of each tensor, or of its displacement: 0 to the bit where it has not moved. Collective.

    Args:
        tensors: with the same keys in the same order on all ranks.
        since: earlier values of some of them: of these the mean displacement since then is wanted.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    kinds = {key: _wide_type(tensor) for key, tensor in tensors.items()}
    for bucket in buckets(tensors, kinds.__getitem__, lambda key: tensors[key].numel() * kinds[key].itemsize):
        values = [wide(tensors[key]) - since[key] if key in since else wide(tensors[key]) for key in bucket]
        flat = torch.cat([value.reshape(-1) for value in values])
        if size > 1:
            dist.all_reduce(flat)
            flat /= size
        for key, value, mean in zip(bucket, values, flat.split([value.numel() for value in values]), strict=True):
            yield key, mean.view(value.shape)


def buckets(items: Iterable[_K], kind: Callable[[_K], torch.dtype], size: Callable[[_K], int]) -> Iterator[list[_K]]:
    """Yield items of one type that travel together, in their order; `size` is in bytes."""
    by_type: dict[torch.dtype, list[_K]] = {}
    for item in items:
        by_type.setdefault(kind(item), []).append(item)
    for alike in by_type.values():
        bucket, room = list[_K](), _BUCKET
        for item in alike:
            if bucket and size(item) > room:
                yield bucket
                bucket, room = [], _BUCKET
            bucket.append(item)
            room -= size(item)
        yield bucket


@torch.no_grad()
def copy_tensors_from_main(tensors: Iterable[Tensor]) -> None:
    """Take rank 0's values, of tensors that are alike in number and form on all ranks. Collective."""
    if not dist.is_initialized():
        return
    for bucket in buckets(tensors, lambda tensor: tensor.dtype, lambda tensor: tensor.nbytes):
        values = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.broadcast(values, src=0)
        for tensor, own in zip(bucket, values.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(own.view_as(tensor))


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_type(tensor))


def _wide_type(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
