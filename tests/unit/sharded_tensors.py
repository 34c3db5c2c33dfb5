"""One rank of several in a process of its own: torch's fake process group, in which collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(rank: int, size: int, *, replicas: int = 1) -> Iterator[DeviceMesh]:
    """Be one of so many ranks, in a mesh of replicas and shards."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        # Torch keeps the meshes that it has met, and takes those of two ranks for one if they have the same names.
        yield init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicas", f"shards_of_{rank}"))
    finally:
        dist.destroy_process_group()


def sharded_among(mesh: DeviceMesh, whole: Tensor) -> Tensor:
    """Return a tensor of which this rank has the rows that are its shard's."""
    shards, number = mesh.size(1), mesh.get_coordinate()[1]  # type: ignore[index]
    rows = -(-len(whole) // shards)
    own = whole[min(number * rows, len(whole)) : (number + 1) * rows].clone()
    tensor: Tensor = DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    return tensor


def example(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
