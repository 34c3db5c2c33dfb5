"""Several optimizers behind one: each for parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import few, matching, named_parameters
from ddp_train.optimizer.groups import split_by_decay
from ddp_train.traits import has_modes


class Several(torch.optim.Optimizer):
    """Several torch optimizers for different parameters behind one interface.

    The groups and the state of the parts are this optimizer's own: schedulers, gradient scalers and checkpoints see one ordinary optimizer.
    A part whose parameters have no gradient does nothing, as in the turns of others.

    Args:
        parts: their order is part of the state's format.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with every part; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also the end of load_state_dict, which makes new groups and a new state
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups, part.state = list(islice(groups, len(part.param_groups))), self.state


def several(model: nn.Module, *, parts: Mapping[str, Callable[..., torch.optim.Optimizer]]) -> Several:
    """Train each part of the model by an optimizer of its own: generator and discriminator, actor and critic.

    Args:
        model: after the strategy has prepared it.
        parts: name of a part of the model (a pattern, as in `optimizer.groups`) -> its optimizer, which still needs its parameters. Biases
            and norm weights are not decayed.
    """
    named = {name: parameter for name, parameter in named_parameters(model).items() if parameter.requires_grad}
    left, made = dict(named), []
    for part, make in parts.items():
        names = matching(named, [part], key="optimizer.parts")
        if twice := [name for name in named if name in names and name not in left]:
            raise ConfigError(
                key=f"optimizer.parts.{part}", happened=f"has {twice[0]}, and a part before it has it, too", expected="one part"
            )
        mine = [left.pop(name) for name in named if name in names]
        made.append(make(split_by_decay(mine, getattr(make, "keywords", {}).get("weight_decay"))))
        if has_modes(made[-1]):
            raise ConfigError(
                key=f"optimizer.parts.{part}",
                happened=f"{type(made[-1]).__name__} has other weights to evaluate than to train, which the other parts would not follow",
                expected="an ordinary optimizer as a part; a schedule-free one trains the whole model",
                fix="optimizer=custom with its optimizer._target_",
            )
    if left:
        raise ConfigError(key="optimizer.parts", happened=f"{len(left)} parameters are in no part: {few([*left])}", expected="each in one")
    return Several(*made)
