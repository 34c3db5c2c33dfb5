"""torch's AdamW, with less to do beside its kernel.

Of the 185 us that torch 2.13 takes on a CPU for a step of eight small parameters its kernel takes 100; the rest is Python: a mark for a
profiler, and each tensor's type, device and settings looked at again. Here they are looked at once. The kernel is torch's own, and so is
every number, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW as TorchAdamW  # by a name of its own: its arguments are read from the source
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ddp_train.system import torch_internals


class AdamW(TorchAdamW):
    """AdamW, as torch's in its arguments, its state and its results.

    A step is torch's own where something is to happen beside the kernel: hooks, a profiler, a closure, a loss scaler or a guard that may
    leave the step out, parameters without a gradient or cut among ranks, settings other than the kernel's.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    saved_as = TorchAdamW
    """Whose state this is: either goes on from the other's checkpoints."""

    # As torch's, without the wrapper that hides them from the compiler: to do so it imports that, half a second before the first step.
    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)

    _looked_at: list[list[nn.Parameter]] | None = None  # the groups that are the kernel's alone; None: not looked at, or they are not

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None or not _KNOWS_TORCH or self._has_company():
            return _step_in_company(self, closure)
        groups = self._arguments()
        if groups is None:
            _step(self)
            self._looked_at = [[*group["params"]] for group in self.param_groups] if all(map(_is_plain, self.param_groups)) else None
            return None
        with torch.no_grad():
            for group, gradients, states in groups:
                steps = [state["step"] for state in states]
                averages, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
                beta1, beta2 = group["betas"]
                settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "amsgrad")}
                torch._foreach_add_(steps, 1)
                torch._fused_adamw_(group["params"], gradients, averages, squares, [], steps, beta1=beta1, beta2=beta2, **settings)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it: its hooks and its mark are in `_step_in_company`

    def _has_company(self) -> bool:
        """Tell whether somebody wants to be asked about the step, or to be shown it."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or torch.autograd.profiler._is_profiler_enabled
            or getattr(self, "found_inf", None) is not None
            or getattr(self, "grad_scale", None) is not None
        )

    def _arguments(self) -> list[tuple[dict[str, Any], list[Tensor], list[dict[str, Tensor]]]] | None:
        """Return each group, and the gradients and states of its parameters; None: torch has to look at what has changed."""
        if self._looked_at is None or len(self._looked_at) != len(self.param_groups):
            return None
        found = []
        for known, group in zip(self._looked_at, self.param_groups, strict=True):
            parameters = group["params"]
            gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
            states = [state for parameter in parameters if (state := self.state.get(parameter)) is not None]
            if not len(gradients) == len(states) == len(parameters) == len(known) or not all(map(is_, parameters, known)):
                return None
            found.append((group, gradients, states))
        return found


_KNOWS_TORCH = not torch_internals.missing(torch_internals.OF_ADAMW)


def _is_plain(group: dict[str, Any]) -> bool:
    """Tell whether a group's parameters are all here and of one kind, and its settings those of the kernel alone."""
    if not group["fused"] or group["amsgrad"] or group["capturable"] or isinstance(group["lr"], Tensor) or not group["params"]:
        return False
    first = group["params"][0]
    return all(
        type(each) is nn.Parameter
        and (each.dtype, each.device) == (first.dtype, first.device)
        and each.is_floating_point()
        and (each.grad is None or each.grad.layout is torch.strided)
        for each in group["params"]
    )


_torch_step = unwrap(TorchAdamW.step)
"""torch's own, without a wrapper around it that imports the compiler, too."""


def _step(optimizer: TorchAdamW, closure: Callable[[], Any] | None = None) -> Any:
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        return _torch_step(optimizer, closure)


_step_in_company = Optimizer.profile_hook_step(_step)
"""The same with its hooks, and its mark for a profiler."""
