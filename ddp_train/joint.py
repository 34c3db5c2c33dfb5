"""The model and an objective that has weights of its own, as one module: what is done for the one is done for the other.

A strategy wraps it, so that gradients are reduced and buffers shared as the model's are; optimizer, clipping and checkpoints see its
parameters. An objective without a state needs none of this, and the strategy gets the plain model.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Self

from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Objective


class Joint(nn.Module):
    """Computes the loss of a batch in its forward, so that a strategy sees where each parameter is used.

    Args:
        objective: an `nn.Module`, too.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective: Any = objective

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss summed over the batch's units, shape []."""
        loss: Tensor = self.objective.loss(self.model, batch)
        return loss

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; that of the objective's parts is its own (a teacher that only evaluates)."""
        self.training = mode
        self.model.train(mode)
        return self


def has_state(objective: Objective) -> bool:
    """Tell whether an objective has something to train, to share or to save.

    Raises:
        ConfigError: it has parameters to train where nobody finds them.
    """
    if isinstance(objective, nn.Module):
        return any(parameter.requires_grad for parameter in objective.parameters()) or any(True for _ in objective.buffers())
    for name, value in getattr(objective, "__dict__", {}).items():
        held = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else []
        if any(tensor.requires_grad for tensor in held):
            raise ConfigError(
                key="objective",
                happened=f"{type(objective).__name__}.{name} has parameters to train, but {type(objective).__name__} is no torch.nn.Module",
                expected="an nn.Module, whose parameters are found, trained and saved",
                fix=f"class {type(objective).__name__}(nn.Module), with super().__init__(); or {name}.requires_grad_(False)",
            )
    return False


def buffers(model: nn.Module, objective: Objective) -> list[Tensor]:
    """Return the buffers of both."""
    return list(chain(model.buffers(), objective.buffers() if isinstance(objective, nn.Module) else ()))
