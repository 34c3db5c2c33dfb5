"""Data parallelism whose optimizer state is sharded among the ranks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.interfaces.strategy import RankMemory, from_local_rows, local_rows
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.means import buckets
from ddp_train.traits import refuse_modes


@dataclass
class _Shard:
    """A parameter, and the rows of it that this rank steps."""

    whole: nn.Parameter
    rows: nn.Parameter  # a view of them, sharded among the ranks
    first: int
    most: int  # rows that a rank has

    def gradient(self) -> Tensor | None:
        gradient = self.whole.grad
        return None if gradient is None else from_local_rows(gradient[self.first : self.first + local_rows(self.rows).shape[0]], self.rows)


class Zero1(DDP):
    """Weights and gradients as DDP has them; each rank steps its rows of every parameter, keeps their state, and gives them to the others.

    In an optimizer's step shards take the places of its parameters, which then come back: nobody else sees them. A parameter without
    dimensions is whole on every rank, and its state, too.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054 (stage 1).
    """

    shards_optimizer = True

    def setup_optimizer(self, optimizer: Optimizer) -> Mapping[Tensor, Tensor]:
        refuse_modes(optimizer, "of which strategy=zero1 has a part")
        shards = list(_shard(parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.ndim))
        together = list(buckets(shards, lambda shard: shard.whole.dtype, lambda shard: shard.whole.nbytes))

        def before(optimizer: Optimizer, *_: Any) -> None:
            for shard in shards:
                shard.rows.grad = shard.gradient()
            _replace(optimizer, {shard.whole: shard.rows for shard in shards})

        def after(optimizer: Optimizer, *_: Any) -> None:
            _replace(optimizer, {shard.rows: shard.whole for shard in shards})
            for shard in shards:
                shard.rows.grad = None
            with self.clock.around():
                for bucket in together:
                    _all_gather(bucket)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return {shard.whole: shard.rows for shard in shards}

    def rank_memory(self, trained_module: nn.Module, world_size: int) -> RankMemory:
        return RankMemory(optimizer_shards=world_size)


def _replace(optimizer: Optimizer, others: Mapping[Tensor, Tensor]) -> None:
    """Put others in the places of an optimizer's parameters, with their state."""
    for group in optimizer.param_groups:
        group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
    for parameter, other in others.items():
        if parameter in optimizer.state:
            optimizer.state[other] = optimizer.state.pop(parameter)


def _shard(parameters: Iterable[nn.Parameter]) -> Iterator[_Shard]:
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
def _all_gather(bucket: list[_Shard]) -> None:
    """Put the rows that each rank has stepped into the whole parameters of all ranks. Collective."""
    sizes = [shard.most * shard.whole[:1].numel() for shard in bucket]
    first = bucket[0].whole
    mine = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    for shard, place in zip(bucket, mine.split(sizes), strict=True):
        rows = local_rows(shard.rows)
        place[: rows.numel()] = rows.reshape(-1)
    every = mine.new_empty(dist.get_world_size(), len(mine))
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # by its older name in torch 2.10
    gather(every.view(-1), mine)
    for shard, places in zip(bucket, every.split(sizes, dim=1), strict=True):
        shard.whole.copy_(places.reshape(-1)[: shard.whole.numel()].view(shard.whole.shape))
