"""torch's AdamW, with less Python around its kernel.

torch 2.13 takes 185 us on a CPU for a step of eight small parameters: 100 in its kernel, the rest in Python for a profiler's mark and for
checks of types, devices and settings. Here they are checked once. The kernel is torch's own, and every number is the same to the bit.
"""

from collections.abc import Callable
from inspect import unwrap
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW as TorchAdamW  # renamed: its arguments are read from the source
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ddp_train.system import torch_internals

_KNOWS_TORCH = not torch_internals.missing(torch_internals.OF_ADAMW)
_torch_step = unwrap(TorchAdamW.step)  # without the wrapper, which imports the compiler


class AdamW(TorchAdamW):
    """AdamW, as torch's in its arguments, its state and its results.

    torch's own step runs if more than the kernel is needed: hooks, a profiler, a closure, a loss scaler or a guard that may skip the step,
    parameters without a gradient or sharded among ranks, settings that the kernel lacks.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    saved_as = "torch.optim.adamw.AdamW"
    steps_parameters_alone = True
    spares_compiler = True  # the launcher reads it
    # torch's methods without the wrapper that hides them from the compiler, which imports it: half a second before the first step.
    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)

    _checked_groups: list[list[nn.Parameter]] | None = None  # for the kernel alone; None: not checked, or not for it alone

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None or not _KNOWS_TORCH or self._needs_torch_step():
            return _step_with_hooks(self, closure)
        groups = self._arguments()
        if groups is None:
            _step(self)
            fits = all(map(_fits_kernel, self.param_groups))
            self._checked_groups = [[*group["params"]] for group in self.param_groups] if fits else None
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

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it: its hooks and its profiler mark are in `_step_with_hooks`

    def _needs_torch_step(self) -> bool:
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
        """Return each group, and the gradients and states of its parameters; None: they have changed since they were checked."""
        if self._checked_groups is None or len(self._checked_groups) != len(self.param_groups):
            return None
        arguments = []
        for known, group in zip(self._checked_groups, self.param_groups, strict=True):
            parameters = group["params"]
            gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
            states = [state for parameter in parameters if (state := self.state.get(parameter)) is not None]
            if not len(gradients) == len(states) == len(parameters) == len(known) or not all(map(is_, parameters, known)):
                return None
            arguments.append((group, gradients, states))
        return arguments


def _fits_kernel(group: dict[str, Any]) -> bool:
    """Tell whether the kernel alone can update a group: plain parameters of one dtype and device, and the kernel's settings."""
    if not group["fused"] or group["amsgrad"] or group["capturable"] or isinstance(group["lr"], Tensor) or not group["params"]:
        return False
    first = group["params"][0]
    return all(
        type(parameter) is nn.Parameter
        and (parameter.dtype, parameter.device) == (first.dtype, first.device)
        and parameter.is_floating_point()
        and (parameter.grad is None or parameter.grad.layout is torch.strided)
        for parameter in group["params"]
    )


def _step(optimizer: TorchAdamW, closure: Callable[[], Any] | None = None) -> Any:
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        return _torch_step(optimizer, closure)


_step_with_hooks = Optimizer.profile_hook_step(_step)  # and with its mark for a profiler
