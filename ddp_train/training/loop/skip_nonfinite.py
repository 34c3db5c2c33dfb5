"""Let the optimizer take only the steps with finite numbers (`health.on_nonfinite=skip`).

The device decides by a number that is the same on all ranks: the norm of the gradients after their all-reduce. A loss that is not finite on
one rank reaches the others in those gradients, so that no other collective is needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ddp_train.training.loop.train_step import StepGuard


class SkippingGuard(StepGuard):
    """Leaves out every step whose loss or gradient norm is not finite: parameters, optimizer state and buffers stay as they were.

    Fused optimizers of torch skip a step on the device, and the host does not wait; with others the host reads one number a step. It does
    so with all until the first step is taken: fused SGD would keep uninitialised memory as its momentum (torch 2.13).
    Random streams go on, and a loss scaler lowers its scale as for any overflow.
    """

    skips_steps = needs_norm = True

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._skips_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._taken: set[str | None] = {None} if optimizer.state else set()  # turns that have taken a step
        # torch counts every change in place but those of batch norm's kernels to its averages.
        uncounted = {id(buffer) for module in model.modules() if isinstance(module, _NormBase) for buffer in module.buffers(recurse=False)}
        self._copies = [
            _BufferCopy(buffer, buffer.detach().clone(), buffer._version, id(buffer) in uncounted) for buffer in model.buffers()
        ]

    def begin(self) -> None:
        for copy in self._copies:
            if copy.may_have_changed():
                copy.value.copy_(copy.buffer)
                copy.version = copy.buffer._version

    def spread_nonfinite(self, factor: Tensor, loss: Tensor) -> Tensor:
        """Return `factor`, or NaN where this rank's loss is not finite: then the gradients are NaN on all ranks."""
        return factor * (1.0 + 0.0 * loss.detach())

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor | None, *, turn: str | None = None) -> None:
        assert grad_norm is not None
        is_bad = torch.isfinite(grad_norm).logical_not_()
        if scaler.is_enabled():  # by itself it skips infinite gradients, but not finite ones whose norm overflows
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                found_inf.logical_or_(is_bad.to(found_inf.device))  # which is the host where the shards are in its memory
        if not (self._skips_on_device and turn in self._taken):
            if not is_bad.item():
                scaler.step(optimizer)
                self._taken.add(turn)
        elif scaler.is_enabled():
            scaler.step(optimizer)
        else:
            optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        with torch.no_grad():
            for copy in self._copies:
                if copy.may_have_changed():
                    copy.buffer.copy_(torch.where(is_bad, copy.value, copy.buffer))


@dataclass
class _BufferCopy:
    buffer: Tensor
    value: Tensor  # before the step
    version: int  # of the buffer when it was copied
    is_uncounted: bool  # torch does not count its changes

    def may_have_changed(self) -> bool:
        return self.is_uncounted or self.buffer._version != self.version
