"""Data parallelism whose gradients travel as thin matrices, for slow networks."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.futures import Future

from ddp_train.interfaces import RankMemory
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.means import means, wide

_EPS = 1e-8  # a column of zeros stays one


class PowerSGD(DDP):
    """Let all ranks step by nearly the mean of their gradients; a rank adds what is left out to its next gradient (error feedback).

    A gradient with two dimensions or more is a matrix M [rows, columns] of its first dimension by all others. With a basis Q of the step
    before, P = M Q travels, [rows, rank]; and, when P is orthonormal, M^T P, [columns, rank], which is the next basis. Their product stands
    for the mean of M. All that would not become smaller travels as it is. All ranks have the same weights after each step, to the bit.

    Exchanged after backward, in two rounds of messages of 25 MiB, and nothing waits for the device. One rank alone trains the plain model.

    Args:
        rank: of the product, at least 1: more travels, and less is left out.
        from_step: steps in which whole gradients travel first: they are large then, and change fast.
        sync_batchnorm: as DDP's.

    Source: Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727 (algorithms 1 and 2; warm start).
    """

    state_is_per_rank = True
    refuses_loss_scale = "with strategy=power_sgd a step adds the rest of the step before it, which had another loss scale"
    argument_ranges: ClassVar = {"rank": {"min": 1}, "from_step": {"min": 0}}

    def __init__(self, *, rank: int = 4, from_step: int = 1000, sync_batchnorm: bool = False) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        self._rank, self._from_step = rank, from_step
        self._size = 1
        self._residuals: dict[str, Tensor] = {}  # error feedback: [rows, columns], float32, by parameter; this rank's
        self._bases: dict[str, Tensor] = {}  # [columns, rank], float32; the same on all ranks

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        self._size = world_size
        return super().prepare(model, device, world_size)

    @torch.no_grad()
    def reduce_gradients(self, trained_module: nn.Module, step: int) -> None:
        if self._size == 1:
            return
        named = ((name, parameter.grad) for name, parameter in trained_module.named_parameters())
        gradients = {name: gradient for name, gradient in named if gradient is not None}
        thin = {name: gradient for name, gradient in gradients.items() if step >= self._from_step and self._is_compressed(gradient)}
        matrices = {name: wide(gradient.flatten(1)) + self._last_residual(name, gradient) for name, gradient in thin.items()}
        travels = {name: matrices[name] @ self._basis(name, matrices[name]) if name in thin else gradients[name] for name in gradients}
        lefts = dict[str, Tensor]()
        for name, mean in means(travels):
            if name in thin:
                lefts[name] = _orthonormal(mean)
            else:
                gradients[name].copy_(mean)
        for name, basis in means({name: matrices[name].T @ left for name, left in lefts.items()}):
            product = lefts[name] @ basis.T
            gradients[name].copy_(product.view(gradients[name].shape))
            self._keep(name, matrices[name] - product, basis)

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": dict(self._residuals), "bases": dict(self._bases)}

    def start_training(self, trained_module: nn.Module, state: Mapping[str, Any], *, weights_are_equal: bool) -> None:
        self._residuals, self._bases = dict(state.get("left_out", {})), dict(state.get("bases", {}))

    def rank_memory(self, trained_module: nn.Module, world_size: int) -> RankMemory:
        """Return the memory of this rank's residuals at most, and of the bases."""
        thin = [each for each in trained_module.parameters() if world_size > 1 and each.requires_grad and self._is_compressed(each)]
        return RankMemory(exchange_bytes=sum(4 * (each.numel() + self._rank * each[0].numel()) for each in thin))

    def _comm_hook(self) -> Callable[[Any, Any], Future[Tensor]]:
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook  # which takes its time

        return noop_hook  # gradients stay as they are: they are exchanged after backward

    def _is_compressed(self, gradient: Tensor) -> bool:
        """Tell whether a gradient is a matrix that takes more than the two thin ones."""
        return gradient.ndim > 1 and self._rank * (len(gradient) + gradient[0].numel()) < gradient.numel()

    def _last_residual(self, name: str, gradient: Tensor) -> Tensor | float:
        return self._residuals[name].to(gradient.device) if name in self._residuals else 0.0

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        """Return the last step's, or random numbers that are the same on all ranks and in all runs."""
        if name not in self._bases:
            stream = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._bases[name] = torch.randn(matrix.shape[1], self._rank, generator=stream)
        self._bases[name] = self._bases[name].to(matrix.device)
        return _orthonormal(self._bases[name])

    def _keep(self, name: str, residual: Tensor, basis: Tensor) -> None:
        """Keep it for the next step; where a rank's gradient was not finite, what was kept before, on all ranks."""
        is_finite = torch.isfinite(basis).all()
        self._residuals[name] = torch.where(is_finite, residual, self._last_residual(name, residual))
        self._bases[name] = torch.where(is_finite, basis, self._bases[name])


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return a matrix whose columns span the same and are orthonormal, by Gram and Schmidt: torch's QR may wait for the device."""
    columns = list(matrix.unbind(1))
    for place, column in enumerate(columns):
        for before in columns[:place]:
            column = column - before * (before @ column)
        columns[place] = column / (column.norm() + _EPS)
    return torch.stack(columns, dim=1)
