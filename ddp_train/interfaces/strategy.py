"""How the ranks hold a model together: the base class of strategies, and tensors of which each rank has some rows.

A strategy cuts a tensor along its first dimension: it is torch's DTensor then, and all others are whole. A rank may have no row at all.
With replicas (a mesh of two dimensions: replicas, shards) several ranks keep the same rows. The rows of a contiguous tensor follow each
other in its logical order, so each rank has a range of it: by that the values travel to files and back.

Imports nothing of DTensor's, which takes its time, unless there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Place = tuple[int, torch.Size]
"""Where a tensor lies: of its memory the address, and its shape."""


def place_of(tensor: Tensor) -> Place:
    """Return where a tensor lies. Views of the whole of it, as `state_dict` gives them, lie at the same place."""
    return tensor.data_ptr(), tensor.shape


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Among how many ranks each part of a run is cut; 1: every rank has all of it."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    on_host: bool = False  # all three lie in the host's memory, whatever the device is


class Strategy:
    """Which rank keeps which weights, gradients and optimizer state, and when the ranks exchange them.

    A strategy has `prepare`, and overrides what else it needs: by default every rank has all of everything, and nothing is exchanged but in
    backward.

    A tensor that a strategy cuts among the ranks is a DTensor of which each rank has some rows (`is_cut`): a parameter, its gradient, a
    tensor of the optimizer. All else is alike on all ranks after a step, unless `has_local_weights`. The gradients of a step are the mean
    over the ranks of what backward gave each rank: the loop multiplies its loss by their number.
    """

    # Facts of the class, which the check before the start reads from its source: plain constants.
    has_buckets = False  # the first backwards decide in which order the ranks' values are added: a run that resumes takes two first
    fills_models = False  # `prepare` gives a model without values (torch's meta device) rank 0's, which has them
    computes_together = False  # every forward is a collective: all ranks take as many, also in evaluation and in callbacks
    steps_rows = False  # the optimizer steps some rows of each parameter: it must not need whole matrices
    reduces_in_backward = False  # a parameter's gradient is final as soon as backward has it: the optimizer may step there
    has_local_weights = False  # ranks step weights of their own and synchronise now and then
    has_error_feedback = False  # what one exchange of the gradients leaves out is added to the next one
    static_graph = False  # it relies on every step using the same parameters in the same order

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        """Return the module to train, on `device`, with rank 0's weights. Collective.

        Called again with the same model when other parameters of it are to be trained than before (`requires_grad`).

        Args:
            model: what computes the loss: the model and the objective in one module (`Joint`), whose forward takes a batch and returns the
                loss. For `ddp-train evaluate` the model alone.
        """
        raise NotImplementedError

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for forward and backward of all micro-batches of a step but the last: gradients need not be exchanged there."""
        return nullcontext()

    def keeps_gradients(self, module: nn.Module) -> bool:
        """Tell whether gradients are better zeroed where they are than given back, where a step has several micro-batches."""
        return False

    def share(self, optimizer: Optimizer) -> None:
        """Let the optimizer step as the ranks share its work, by its hooks, or refuse it; once, before its first step, not for one rank."""

    def state_like(self, parameter: nn.Parameter) -> Tensor:
        """Return a tensor that is cut among the ranks as what the optimizer keeps for a parameter: itself, or a shard of it."""
        return parameter

    def rest(self, module: nn.Module) -> None:
        """Release what a forward without backward has kept: after an evaluation, say."""

    def shards(self, world_size: int) -> Shards:
        """Return among how many of so many ranks the parts of a run will be cut. Asked before anything is: `ddp-train plan` does."""
        return Shards()

    def computes_in(self, world_size: int) -> torch.dtype | None:
        """Return the type in which weights travel and compute on so many ranks; None: that in which they are kept."""
        return None

    # Gradients that are exchanged after backward. What a rank keeps of them is saved as its own; another number of ranks begins without it.

    def reduce(self, trained: nn.Module, step: int) -> None:
        """Put the mean over the ranks in the place of each gradient, where backward did not. Collective; after a step's last backward.

        Args:
            step: how many the run has taken.
        """

    def num_bytes_kept(self, trained: nn.Module, world_size: int) -> int:
        """Return how many bytes each of so many ranks keeps for the next exchange."""
        return 0

    def own_state(self) -> dict[str, Any]:
        """Return what this rank keeps for the next exchange."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint; {}: it has none."""

    # Ranks with weights of their own (`has_local_weights`): each rank's gradient is its share of what the global batch's is the mean of.
    # Nothing else of a step tells ranks apart. Weights and optimizer of a rank are saved as its own; what is evaluated, and what others
    # read of a checkpoint, is the mean (`joined`).

    are_alike: bool = True  # whether all ranks have the same weights and buffers; set when a checkpoint is loaded
    steps_alone: bool = False  # whether there are steps in which ranks exchange nothing, and so do not know what the others have

    def begin(self, trained: nn.Module) -> None:
        """Training begins, or goes on, from the weights as they are now, and from the state that was loaded last, if any."""

    def after_step(self, step: int) -> None:
        """Called after each optimizer step. Collective where the ranks synchronise after it."""

    def joined(self, trained: nn.Module, averages: Iterable[Tensor]) -> AbstractContextManager[Mapping[Place, Tensor]]:
        """Let weights and buffers, and averages of them, be the mean over the ranks; then each rank's own again, to the bit. Collective.

        It may be entered twice.

        Yields:
            This rank's own values of all that was changed, by where they lie (`place_of`).
        """
        return nullcontext({})

    def num_copies(self, world_size: int) -> int:
        """Return how many copies of the weights, in float32 at least, each of so many ranks keeps for the next synchronisation."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return what else a synchronisation needs, the same on all ranks."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the state of a checkpoint; {}: it has none."""


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
    """Return among how many a tensor is cut; one that is distributed in another way is a ValueError."""
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
