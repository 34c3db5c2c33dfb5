"""Tensors that a strategy has cut along their first dimension: torch's DTensor, of which each rank keeps some rows. All others are whole.

A rank may have no row at all. With replicas (a mesh of two dimensions: replicas, shards) several ranks keep the same rows. The rows of a
contiguous tensor follow each other in its logical order, so each rank has a range of it: by that the values travel to files and back.

Imports nothing of DTensor's, which takes its time, unless there is one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def is_cut(value: Any) -> bool:
    """Tell whether a value is a tensor of which this rank has some rows."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


@torch.no_grad()
def own_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, sharing its memory; a whole tensor is all its own."""
    if not is_cut(tensor):
        return tensor.detach()
    rows: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return rows


def num_shards(tensor: Tensor) -> int:
    """Return among how many a tensor is cut.

    Raises:
        ValueError: it is distributed in another way.
    """
    if not is_cut(tensor):
        return 1
    mesh, placements = _layout(tensor)
    *before, last = placements
    if not last.is_shard(0) or not all(each.is_replicate() for each in before):
        raise ValueError(f"a tensor is distributed as {placements}, and not cut along its first dimension")
    size: int = mesh.size(mesh.ndim - 1)
    return size


def num_replicas(tensor: Tensor) -> int:
    """Return how many ranks have the same rows."""
    mesh, _ = _layout(tensor)
    return int(mesh.size()) // num_shards(tensor)


def range_of(shape: torch.Size | tuple[int, ...], shards: int, number: int) -> tuple[int, int]:
    """Return from which to which element of the logical order one shard goes: as `torch.chunk` cuts, the last ones may be empty."""
    rows, each = -(-shape[0] // shards), math.prod(shape[1:])
    return min(number * rows, shape[0]) * each, min((number + 1) * rows, shape[0]) * each


def own_range(tensor: Tensor) -> tuple[int, int]:
    """Return which elements of a tensor this rank has."""
    if not is_cut(tensor):
        return 0, tensor.numel()
    mesh, _ = _layout(tensor)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return range_of(tensor.shape, num_shards(tensor), coordinate[-1])


def as_cut(rows: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of which this rank has `rows`, cut as `like` is, which has its shape. No communication."""
    from torch.distributed.tensor import DTensor

    mesh, placements = _layout(like)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, copied to where `like` is, and cut as that; a whole one like a whole one is itself."""
    if is_cut(whole) or not is_cut(like):
        return whole
    start, stop = own_range(like)
    rows = own_rows(like)
    return as_cut(whole.detach().reshape(-1)[start:stop].view(rows.shape).to(rows.device, copy=True), like)


def _layout(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    return tensor.device_mesh, tensor.placements
