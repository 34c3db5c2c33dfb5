"""How many floating point operations a step's matrix products take, counted once on a copy of the model that has shapes and no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train import model_log
from ddp_train.interfaces import Batch, HasTurns, Joint, map_tensors
from ddp_train.training.seeding import random_state, set_random_state


class ShapeCopy:
    """Model and objective on torch's meta device, as they are before anything wraps, compiles or shards them.

    So what is counted is what the model itself needs: nothing that a strategy does, and no forward that is computed again for the backward.

    Raises:
        Exception: they cannot be copied, or take turns, each with a backward of its own.
    """

    def __init__(self, trained: nn.Module, objective: Any) -> None:
        if isinstance(objective, HasTurns):
            raise ValueError("the parts of the objective take turns")
        shapes: dict[int, Any] = {}
        for part in (trained, objective):
            if isinstance(part, nn.Module):
                for tensor in (*part.parameters(), *part.buffers()):
                    shapes[id(tensor)] = _shape_of(tensor)
        self._trained, self._objective = copy.deepcopy((trained, objective), shapes)

    def count(self, batch: Batch, device: torch.device) -> int:
        """Return the operations of one forward and backward: 2 for each product of two numbers and its sum.

        Counts matrix products, convolutions and torch's attention, all of a causal one too. A kernel of somebody's own counts as nothing.

        Args:
            device: whose random streams are left as they are.

        Raises:
            Exception: the model, or a kernel in it, needs values.
        """
        from torch.utils.flop_counter import FlopCounterMode  # a module that most runs do without

        streams = random_state(device)
        try:
            with model_log.taken_by(None), FlopCounterMode(display=False) as counter:
                shapes = map_tensors(lambda tensor: tensor.to("meta"), batch)
                joint = isinstance(self._trained, Joint)
                loss = self._trained(shapes) if joint else self._objective.loss(self._trained, shapes)
                loss.backward()
        finally:
            set_random_state(streams, device)
        return int(counter.get_total_flops())


def _shape_of(tensor: Tensor) -> Tensor:
    shape = torch.empty_like(tensor, device="meta")
    return nn.Parameter(shape, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
