"""A scheduler that counts epochs (`scheduler.every=epoch`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class EveryEpoch:
    """Lets a scheduler step once for each epoch of the data that is over.

    The data's position decides, not how often anybody asks: a run that went back to a checkpoint while its data went on, or that continues
    with another batch size, has the rate of the epoch that it is in.

    Args:
        scheduler: any of torch's.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        """Take note of an optimizer step, which changes nothing."""

    def reach(self, epoch: int) -> None:
        """Have the rate of an epoch, counted from 0."""
        while self.scheduler.last_epoch < epoch:
            self.scheduler.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rates, one for each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Give it back to the scheduler."""
        self.scheduler.load_state_dict(state_dict)
