"""Whether the optimizer takes a step: always, or only with finite numbers (`health.on_nonfinite=skip`).

Decided on the device, and by what all ranks have alike: the norm of the gradients after their all-reduce. A loss that is not finite on one
rank reaches the others in those gradients, so that no collective is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer


class StepGuard:
    """Takes every step."""

    needs_norm = False  # of every step's gradient

    def begin(self) -> None:
        """Say that a step begins, before its first forward."""

    def mark(self, seed: Tensor, loss: Tensor) -> Tensor:
        """Return what backward begins with: the seed, which is the gradient of what is minimised by the loss; both of shape []."""
        return seed

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor | None, *, turn: str = "") -> None:
        """Let the optimizer step; with `needs_norm`, after unscaling. Where an objective takes turns, `turn` has gradients."""
        scaler.step(optimizer)


class SkippingGuard(StepGuard):
    """Leaves out every step whose loss or gradient norm is not finite: parameters, optimizer state and buffers stay as they were.

    Without waiting for the device where the optimizer can be told on it, as torch's fused ones can; with others the host reads one number
    a step. So it does until the first step is taken: fused SGD would keep uninitialised memory as its momentum (torch 2.13).
    Random streams go on, and a loss scaler lowers its scale as for any overflow.
    """

    needs_norm = True

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._can_tell = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._begun = {""} if optimizer.state else set[str]()  # the turns that have been taken
        # Batch norm's kernels change its averages without a trace; every other change in place is counted by torch.
        untraced = {id(buffer) for module in model.modules() if isinstance(module, _NormBase) for buffer in module.buffers(recurse=False)}
        self._kept = [_Kept(buffer, buffer.detach().clone(), buffer._version, id(buffer) in untraced) for buffer in model.buffers()]

    def begin(self) -> None:
        """Keep a copy of the buffers that have changed."""
        for kept in self._kept:
            if kept.may_have_changed():
                kept.copy.copy_(kept.buffer)
                kept.version = kept.buffer._version

    def mark(self, seed: Tensor, loss: Tensor) -> Tensor:
        """Return the same, or NaN where this rank's loss is not finite: then the gradients are NaN on all ranks."""
        return seed * (1.0 + 0.0 * loss.detach())

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor | None, *, turn: str = "") -> None:
        """Let the optimizer step if the norm is finite."""
        assert grad_norm is not None
        is_bad = torch.isfinite(grad_norm).logical_not_()
        if scaler.is_enabled():  # it skips by itself what unscaling found, which a norm that overflows is not
            for found in scaler._found_inf_per_device(optimizer).values():
                found.logical_or_(is_bad.to(found.device))  # of shards that lie in the host's memory it is there
        if not (self._can_tell and turn in self._begun):
            if not is_bad.item():
                scaler.step(optimizer)
                self._begun.add(turn)
        elif scaler.is_enabled():
            scaler.step(optimizer)
        else:
            optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        with torch.no_grad():
            for kept in self._kept:
                if kept.may_have_changed():
                    kept.buffer.copy_(torch.where(is_bad, kept.copy, kept.buffer))


@dataclass
class _Kept:
    """A buffer and its copy from before the step."""

    buffer: Tensor
    copy: Tensor
    version: int  # of the buffer when it was copied
    is_untraced: bool

    def may_have_changed(self) -> bool:
        return self.is_untraced or self.buffer._version != self.version
