"""How the ranks hold a model together: the base class of strategies, and tensors of which each rank has some rows.

A strategy shards a tensor along its first dimension: it is torch's DTensor then, and all others are whole. A rank may have no row at all.
With replicas (a mesh of two dimensions: replicas, shards) several ranks keep the same rows. The rows of a contiguous tensor follow each
other in its logical order, so each rank has a range of it: by that the values travel to files and back. DTensor's module, which takes its
time, is imported only where there is one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.traits import Adapted, StrategyConstants

MemoryKey = tuple[int, torch.Size]
"""The address of a tensor's memory, and its shape."""


def memory_key(tensor: Tensor) -> MemoryKey:
    """Return a key that tensors share which are the same memory in the same shape, as a parameter and its entry in `state_dict`."""
    return tensor.data_ptr(), tensor.shape


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank: the number of shards of each part, of which it keeps one, and the bytes of an exchange."""

    parameter_shards: int = 1
    gradient_shards: int = 1
    optimizer_shards: int = 1
    exchange_bytes: int = 0  # for the next exchange of gradients, or of weights
    on_host: bool = False  # parameters, gradients and optimizer state lie in the host's memory, whatever the device is


@dataclass(frozen=True)
class ExchangeClock:
    """Times a strategy's exchanges (`Strategy.set_clock`). By default it times nothing."""

    around: Callable[[], AbstractContextManager[object]] = nullcontext  # the context of an exchange outside backward
    begin_in_backward: Callable[[], object] = lambda: None  # all gradients are there: from now on backward waits for the exchange


class Strategy(StrategyConstants, ABC):
    """Which rank keeps which weights, gradients and optimizer state, and when the ranks exchange them.

    A strategy must have `prepare`, and overrides what differs from the defaults: every rank has all of everything, and nothing is exchanged
    but in backward. Methods stand in the order of a run. `prepare` gets a `LossModule` and returns what is `wrapped` in other methods.
    `trained_module` is all that is trained, unwrapped: the user's model, or the `LossModule` where the objective has a state of its own.

    A sharded tensor is a DTensor of which each rank has some rows (`is_sharded`): a parameter, its gradient, a tensor of the optimizer. All
    else is the same on all ranks after a step, unless `weights_are_per_rank`. The gradients of a step are the mean over the ranks of what
    backward gave each rank: the loop multiplies its loss by their number.

    With `weights_are_per_rank` each rank steps weights of its own, and the ranks synchronise them now and then. A checkpoint has each
    rank's weights and optimizer. The mean of the weights is evaluated, and saved for runs on another number of ranks.
    """

    graph_is_static: bool = False  # every step must use the same parameters in the same order
    param_dtype: torch.dtype | None = None  # in which weights travel and compute, as in FSDP2; None: in their own
    exchange_is_timed: bool = False  # also within backward, by `begin_in_backward`; else that time is in forward's and backward's
    has_local_steps: bool = False  # in some steps the ranks exchange nothing: a rank does not know what the others' batches weigh
    weights_are_equal: bool = True  # now, on all ranks, with the buffers

    @abstractmethod
    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        """Return the module whose forward is called, on `device`, with rank 0's weights. Collective.

        `model` is always a `LossModule`: its forward returns the loss of a batch. A run calls this once, or once for each turn of its
        objective while the parameters that others train are frozen; and again each time that other parameters are to be trained than
        before (`requires_grad`). `ddp-train evaluate` does with `shards_parameters` alone, while all is frozen.

        With `shards_parameters` the parameters are sharded in place, and the model is returned itself: evaluation and checkpoints go on
        with the modules in it. It may have values on rank 0 alone then, and be on torch's meta device on the others.
        One rank alone has no process group, but in tests (`torch.distributed.is_initialized()`).
        """

    def setup_optimizer(self, optimizer: Optimizer) -> Mapping[Tensor, Tensor]:
        """Let the optimizer step as the ranks share its work, by its hooks, or refuse it; once, before its first step, not for one rank.

        Returns, for each parameter of which the optimizer steps a shard in its place, that shard.
        """
        return {}

    def rank_memory(self, trained_module: nn.Module, world_size: int) -> RankMemory:
        """Return the memory of each of so many ranks: `ddp-train plan` asks on one rank, before anything is sharded."""
        return RankMemory()

    def set_clock(self, clock: ExchangeClock) -> None:
        """Time exchanges by this clock from now on. Called before the first step; after the last one with one that times nothing."""

    def start_training(self, trained_module: nn.Module, state: Mapping[str, Any], *, weights_are_equal: bool) -> None:
        """Training starts, or goes on from a checkpoint, after which this is called again. The weights are in place.

        Args:
            state: what `state_dict` gave when the checkpoint was saved; {}: there is none, or each rank's own of another number of ranks.
            weights_are_equal: all ranks have the same weights; False with `weights_are_per_rank` alone.
        """

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context for forward and backward of all micro-batches of a step but the last: gradients need not be exchanged there."""
        return nullcontext()

    def reduce_gradients(self, trained_module: nn.Module, step: int) -> None:
        """Put the mean over the ranks in the place of each gradient, where backward did not; after `step` steps. Collective."""

    def zeroes_gradients_in_place(self, wrapped: nn.Module) -> bool:
        """Tell, after the optimizer's step, whether gradients are better zeroed in place than set to None; of several micro-batches."""
        return False

    def after_step(self, step: int) -> None:
        """Called after each optimizer step. Collective where the ranks synchronise their weights after it."""

    def mean_over_ranks(self, trained_module: nn.Module, averages: Iterable[Tensor]) -> AbstractContextManager[Mapping[MemoryKey, Tensor]]:
        """Let weights and buffers, and averages of them, be the mean over the ranks; then each rank's own again, to the bit. Collective.

        Entered for each evaluation and each save, also within another. Yields this rank's own values of all that changed (`memory_key`).
        """
        return nullcontext({})

    def reshard(self, trained_module: nn.Module) -> None:
        """Free the weights that a forward without a backward has gathered: after an evaluation, say."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the exchanges for a save; `start_training` gets it back.

        With `weights_are_per_rank` it is kind -> parameter -> tensor, and compared between the ranks while their weights are equal.
        """
        return {}


class AdaptedStrategy(Adapted, Strategy, base=Strategy):
    """A strategy whose class does not inherit from ours."""

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        module: nn.Module = self.wrapped.prepare(model, device, world_size)
        return module


def is_sharded(value: Any) -> bool:
    """Tell whether a value is a sharded tensor (torch's DTensor), of which this rank has some rows."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


@torch.no_grad()
def local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, sharing its memory; all rows of a whole tensor."""
    if not is_sharded(tensor):
        return tensor.detach()
    rows: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return rows


def num_shards(tensor: Tensor) -> int:
    """Return how many shards a tensor has, 1 where it is whole; a ValueError: it is distributed in another way than by rows."""
    if not is_sharded(tensor):
        return 1
    mesh, placements = _layout(tensor)
    *before, last = placements
    if not last.is_shard(0) or not all(each.is_replicate() for each in before):
        raise ValueError(f"a tensor is distributed as {placements}, and not sharded along its first dimension")
    return int(mesh.size(mesh.ndim - 1))


def num_replicas(tensor: Tensor) -> int:
    """Return how many ranks have the same rows of a sharded tensor."""
    return int(_layout(tensor)[0].size()) // num_shards(tensor)


def shard_range(shape: torch.Size | tuple[int, ...], shards: int, number: int) -> tuple[int, int]:
    """Return from which to which element of the logical order one shard goes: as `torch.chunk` splits, the last ones may be empty."""
    rows, per_row = -(-shape[0] // shards), math.prod(shape[1:])
    return min(number * rows, shape[0]) * per_row, min((number + 1) * rows, shape[0]) * per_row


def local_range(tensor: Tensor) -> tuple[int, int]:
    """Return from which to which element of a tensor's logical order this rank's rows go."""
    if not is_sharded(tensor):
        return 0, tensor.numel()
    coordinate = _layout(tensor)[0].get_coordinate()
    assert coordinate is not None
    return shard_range(tensor.shape, num_shards(tensor), coordinate[-1])


def from_local_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor of which this rank has `rows`, with the shape and shards of `like`. No communication."""
    from torch.distributed.tensor import DTensor

    mesh, placements = _layout(like)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded as `like` is, this rank's rows copied to its device; the tensor itself where `like` is whole."""
    if is_sharded(whole) or not is_sharded(like):
        return whole
    start, stop = local_range(like)
    rows = local_rows(like)
    return from_local_rows(whole.detach().reshape(-1)[start:stop].view(rows.shape).to(rows.device, copy=True), like)


def _layout(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    return tensor.device_mesh, tensor.placements
