"""Slow weights that follow the trained ones, and to which these go back every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.interfaces import Run
from ddp_train.interfaces.strategy import local_rows, shard_like


class Lookahead:
    """Averages the weights every few steps, and goes on from the average. So with the running averages of batch norms.

    The first time the slow weights are what is there. From then on they keep `decay` to the power of the steps between two times, times
    the share of the run that is over to the power of `decay_power`: soon the weights go nearly as they would alone, at the end they are
    held. Nothing waits for the device.

    Args:
        decay: of the slow weights for each step, at the end of the run; between 0 and 1.
        decay_power: by which the share of the run weakens it, at least 0; 0: it is the same in the whole run.
        every_steps: steps between two times.
        start_step: steps that are taken before the first time.
        return_every_steps: steps between two moments at which the weights also become the slow ones, which do not follow then: before an
            evaluation, say; None: only after the last step.

    Source: Zhang et al. 2019, arXiv:1907.08610 (Lookahead); in this form Jordan 2024, arXiv:2404.00498, section 3.4.
    """

    def __init__(
        self,
        decay: float = 0.95,
        *,
        decay_power: float = 3.0,
        every_steps: int = 5,
        start_step: int = 0,
        return_every_steps: int | None = None,
    ) -> None:
        for name, value, is_fine, expected in (
            ("decay", decay, 0 < decay < 1, "between 0 and 1"),
            ("decay_power", decay_power, decay_power >= 0, "of at least 0"),
            ("every_steps", every_steps, every_steps >= 1, "of at least 1"),
            ("start_step", start_step, start_step >= 0, "of at least 0"),
            ("return_every_steps", return_every_steps, return_every_steps is None or return_every_steps >= 1, "of at least 1, or null,"),
        ):
            if not is_fine:
                raise ValueError(f"{name} is {value}, and a number {expected} is needed")
        self._decay, self._decay_power, self._every_steps = decay, decay_power, every_steps
        self._start_step, self._return_every_steps = start_step, return_every_steps
        self._slow: dict[str, Tensor] = {}  # empty before the first time
        self._live: dict[str, Tensor] = {}  # the model's own, in the same order

    def on_start(self, run: Run) -> None:
        """Go on with the slow weights that were loaded, if any."""
        self._live = _averaged(run.model)
        if self._slow and self._slow.keys() != self._live.keys():
            raise ValueError("the slow weights in the checkpoint are of another model")
        if self._slow:  # in the model's order
            self._slow = {name: shard_like(self._slow[name].to(tensor.device), tensor) for name, tensor in self._live.items()}

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        """Follow, and go back, when it is time."""
        if run.step > self._start_step and run.step % self._every_steps == 0:
            if self._slow:
                keeps = self._decay**self._every_steps * (run.step / run.total_steps) ** self._decay_power
                torch._foreach_lerp_(self._rows(self._slow), [_wide(each) for each in self._rows(self._live)], 1 - keeps)
                self._go_back()
            else:
                self._slow = {name: _wide(tensor.detach()).clone() for name, tensor in self._live.items()}
        every = self._return_every_steps
        if self._slow and (run.step == run.total_steps or (every is not None and run.step % every == 0)):
            self._go_back()

    def state_dict(self) -> dict[str, Any]:
        return {"slow": dict(self._slow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._slow = dict(state["slow"])

    def _go_back(self) -> None:
        torch._foreach_copy_(self._rows(self._live), self._rows(self._slow))

    @staticmethod
    def _rows(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [local_rows(tensor) for tensor in tensors.values()]


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, and the running averages of its batch norms, by name. Of other buffers an average says nothing."""
    norms = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    averages = [each for prefix, norm in norms for each in norm.named_buffers(prefix, recurse=False) if each[1].is_floating_point()]
    return dict((*model.named_parameters(), *averages))


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in which small changes are not lost."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
