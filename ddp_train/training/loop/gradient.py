"""The gradients of a step: backward, their norm, and clipping, also where a strategy has sharded them among the ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.interfaces.strategy import is_sharded, local_rows, num_replicas

_engine_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)  # private (torch_internals.py)
_EPS = 1e-6  # as in torch's own clipping


def backward(loss: Tensor, grad_output: Tensor) -> None:
    """Add the gradients of a loss, shape [], to the parameters', as `loss.backward(grad_output)` does; the tensors differ in value alone.

    `loss.backward` compares the two shapes with the compiler's code: it imports sympy before the first step, and takes 15 us.
    """
    if type(loss) is Tensor and _engine_run_backward is not None:
        _engine_run_backward((loss,), (grad_output,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:  # a subclass of Tensor may do more
        loss.backward(grad_output)


class NormShare(NamedTuple):
    """What this rank's part of a gradient adds to the norm."""

    tensor: Tensor  # its rows here, or their norm
    replicas: int  # ranks that have the same rows; 0: it is whole, and on all ranks


def norm_share(gradient: Tensor) -> NormShare:
    return NormShare(local_rows(gradient), num_replicas(gradient) if is_sharded(gradient) else 0)


def total_norm(gradients: Sequence[Tensor], world: World) -> Tensor:
    """Return the L2 norm over all gradients, shape [], the same on all ranks. Collective where some are sharded: one small all-reduce."""
    return norm_of([norm_share(gradient) for gradient in gradients], world)


def norm_of(shares: Sequence[NormShare], world: World) -> Tensor:
    """Return the L2 norm over all shares, as `total_norm`."""
    unsharded = [share.tensor for share in shares if not share.replicas]
    if len(unsharded) == len(shares):
        return nn.utils.get_total_norm(unsharded)
    # In float64: a square overflows float32 long before the norm does.
    squares = torch.zeros((), dtype=torch.float64, device=world.device)
    for replicas in {share.replicas for share in shares if share.replicas}:
        rows = [share.tensor for share in shares if share.replicas == replicas]
        squares += nn.utils.get_total_norm(rows).to(squares).square() / replicas
    squares = world.sum(squares)
    if unsharded:
        squares = squares + nn.utils.get_total_norm(unsharded).to(squares).square()
    return squares.sqrt().float()


@torch.no_grad()
def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients down where their norm is above `max_norm`. Nothing waits for the device."""
    factor = torch.clamp(max_norm / (norm + _EPS), max=1.0)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        rows = local_rows(gradient)
        groups.setdefault((rows.device, rows.dtype), []).append(rows)
    for (device, _), group in groups.items():
        torch._foreach_mul_(group, factor.to(device))
