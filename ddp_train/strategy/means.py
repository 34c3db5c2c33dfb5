"""The mean of tensors over the ranks, many of them in one message."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 25 << 20  # bytes that travel together
_K = TypeVar("_K", bound=Hashable)


def means(tensors: Mapping[_K, Tensor], since: Mapping[_K, Tensor] = MappingProxyType({})) -> Iterator[tuple[_K, Tensor]]:
    """Yield the mean over the ranks of each tensor, or of how far it has come: 0 to the bit where it has not moved. Collective.

    Args:
        tensors: with the same keys in the same order on all ranks.
        since: where they come from, some of them.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    by_type: dict[torch.dtype, list[_K]] = {}
    for key, tensor in tensors.items():
        by_type.setdefault(_wide_type(tensor), []).append(key)
    for dtype, keys in by_type.items():
        while keys:
            bucket, room = list[_K](), _BUCKET
            while keys and (not bucket or tensors[keys[0]].numel() * dtype.itemsize <= room):
                room -= tensors[keys[0]].numel() * dtype.itemsize
                bucket.append(keys.pop(0))
            values = [wide(tensors[key]) - since[key] if key in since else wide(tensors[key]) for key in bucket]
            flat = torch.cat([value.reshape(-1) for value in values])
            if size > 1:
                dist.all_reduce(flat)
                flat /= size
            for key, value, mean in zip(bucket, values, flat.split([value.numel() for value in values]), strict=True):
                yield key, mean.view(value.shape)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor.to(_wide_type(tensor))


def _wide_type(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
