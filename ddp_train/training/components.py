"""What a run is made of on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_train.interfaces import Amp, Batch, Joint, Objective, Strategy
from ddp_train.loader.loader import Evaluation, Loader


@dataclass(kw_only=True)
class Components:
    """Everything that the loop works with."""

    model: nn.Module  # as the config says; what is evaluated
    trained: nn.Module  # the model, joined with an objective that has a state of its own: what is optimised, saved and compared
    module: nn.Module  # the same, as the strategy wraps it
    objective: Objective
    optimizer: Optimizer
    scheduler: LRScheduler
    amp: Amp
    scaler: torch.amp.GradScaler
    strategy: Strategy
    train_loader: Loader
    eval_loader: Evaluation | None
    total_steps: int
    answers: Mapping[str, Any] = field(default_factory=dict)  # what the arguments that are `auto` came to, by their keys

    def loss(self, batch: Batch) -> Tensor:
        """Return the objective's loss of a batch, shape [], computed through what the strategy has wrapped."""
        if isinstance(self.trained, Joint):
            loss: Tensor = self.module(batch)
            return loss
        return self.objective.loss(self.module, batch)
