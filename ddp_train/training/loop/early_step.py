"""The optimizer's step within backward: each parameter takes its own as soon as its gradient is whole, which is then forgotten.

So never are more than a few gradients there at a time. Only where a gradient that backward has finished is that of the whole step: one
micro-batch a step, and one process or shards that are reduced within backward (fsdp). DDP's buckets have a place for all gradients anyway,
and are exchanged after backward has finished them.

The optimizer is the run's own, which sees one parameter at a time: its state, its groups and their rates are where they always are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.distributed.world import World
from ddp_train.training.loop.gradient import Part, norm_of, part_of


class EarlyStep:
    """Lets an optimizer step in backward, between `begin` and `end`; at other times a backward leaves gradients as it does without.

    Args:
        optimizer: one that steps each number by itself, as torch's do.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._order = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
        self._num_known = 0  # parameters that have had state before
        self._is_on = self._measures = False
        self._parts: dict[int, Part] = {}  # of the norm, by the parameters' numbers
        for place, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._step, place))

    def begin(self, *, measures_norm: bool) -> None:
        """Let the next backward step the optimizer."""
        self._is_on, self._measures, self._num_known = True, measures_norm, len(self._optimizer.state)

    def end(self, world: World) -> Tensor | None:
        """Return the norm of the gradients that there were, if it was to be measured. Collective where some are cut."""
        parts, self._parts, self._is_on = self._parts, {}, False
        self._sort_state()
        return norm_of([parts[number] for number in sorted(parts)], world) if self._measures else None

    def _step(self, place: int, parameter: Tensor) -> None:
        """Step one parameter of the group at a place, whose rate may have changed, and which a checkpoint may have replaced."""
        optimizer, gradient = self._optimizer, parameter.grad
        if not self._is_on or gradient is None:
            return
        if self._measures:
            part = part_of(gradient)
            self._parts[self._order[parameter]] = part._replace(tensor=torch.linalg.vector_norm(part.tensor))
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[place], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def _sort_state(self) -> None:
        """Let what was added to the optimizer's state have the order of its parameters, as after any other step, not that of backward."""
        state = self._optimizer.state
        if len(state) == self._num_known:
            return
        known = list(state.items())
        added = sorted(known[self._num_known :], key=lambda item: self._order[item[0]])
        state.clear()
        state.update(known[: self._num_known] + added)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
