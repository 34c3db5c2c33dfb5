"""Data parallelism whose optimizer state is cut among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.interfaces import Shards, as_cut, own_rows
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.means import buckets
from ddp_train.traits import refuse_modes


@dataclass
class _Shard:
    """A parameter, and the rows of it that this rank steps."""

    whole: nn.Parameter
    rows: nn.Parameter  # a view of them, cut among the ranks
    first: int
    most: int  # rows that a rank has

    def gradient(self) -> Tensor | None:
        gradient = self.whole.grad
        return None if gradient is None else as_cut(gradient[self.first : self.first + own_rows(self.rows).shape[0]], self.rows)


class Zero1(DDP):
    """Weights and gradients as DDP has them; each rank steps its rows of every parameter, keeps their state, and gives them to the others.

    In an optimizer's step shards take the places of its parameters, which then come back: nobody else sees them. A parameter without
    dimensions is whole on every rank, and its state, too.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054 (stage 1).
    """

    steps_rows = True

    _shards: Mapping[Tensor, _Shard] = MappingProxyType({})  # of one rank alone

    def share(self, optimizer: Optimizer) -> None:
        refuse_modes(optimizer, "of which strategy=zero1 has a part")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._shards = {shard.whole: shard for shard in _cut(parameter for parameter in parameters if parameter.ndim)}
        together = list(buckets(self._shards.values(), lambda shard: shard.whole.dtype, lambda shard: shard.whole.nbytes))

        def before(optimizer: Optimizer, *_: Any) -> None:
            for shard in self._shards.values():
                shard.rows.grad = shard.gradient()
            _put(optimizer, {whole: shard.rows for whole, shard in self._shards.items()})

        def after(optimizer: Optimizer, *_: Any) -> None:
            _put(optimizer, {shard.rows: whole for whole, shard in self._shards.items()})
            for shard in self._shards.values():
                shard.rows.grad = None
            for bucket in together:
                _exchange(bucket)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def state_like(self, parameter: nn.Parameter) -> Tensor:
        return self._shards[parameter].rows if parameter in self._shards else parameter

    def shards(self, world_size: int) -> Shards:
        return Shards(optimizer=world_size)


def _put(optimizer: Optimizer, places: Mapping[Tensor, Tensor]) -> None:
    """Let others take the places of an optimizer's parameters, with their state."""
    for group in optimizer.param_groups:
        group["params"] = [places.get(parameter, parameter) for parameter in group["params"]]
    for parameter, other in places.items():
        if parameter in optimizer.state:
            optimizer.state[other] = optimizer.state.pop(parameter)


def _cut(parameters: Iterator[nn.Parameter]) -> Iterator[_Shard]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, size, mesh = dist.get_rank(), dist.get_world_size(), None
    for parameter in parameters:
        mesh = mesh or init_device_mesh(parameter.device.type, (size,), mesh_dim_names=("shards",))
        most = -(-len(parameter) // size)
        rows = parameter.detach()[min(rank * most, len(parameter)) : (rank + 1) * most]
        whole = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride())
        yield _Shard(parameter, nn.Parameter(whole), min(rank * most, len(parameter)), most)


@torch.no_grad()
def _exchange(bucket: list[_Shard]) -> None:
    sizes = [shard.most * shard.whole[:1].numel() for shard in bucket]
    first = bucket[0].whole
    mine = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    for shard, place in zip(bucket, mine.split(sizes), strict=True):
        rows = own_rows(shard.rows)
        place[: rows.numel()] = rows.reshape(-1)
    every = mine.new_empty(dist.get_world_size(), len(mine))
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by its older name in torch 2.10
    gather(every.view(-1), mine)
    for shard, places in zip(bucket, every.split(sizes, dim=1), strict=True):
        shard.whole.copy_(places.reshape(-1)[: shard.whole.numel()].view(shard.whole.shape))
