"""ReduceLROnPlateau: the rate follows a metric of the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_train.errors import RunError

_COUNTED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class Plateau:
    """Feeds torch's scheduler with one metric after each evaluation.

    Its state is what has been counted, and not what the config says: a patience or a rate that is changed between stop and resume counts.

    Args:
        scheduler: as made, before its first step.
        metric: its name in the evaluation.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str) -> None:
        self.scheduler, self.metric = scheduler, metric
        self._initial = [float(group["lr"]) for group in scheduler.optimizer.param_groups]

    def step(self) -> None:
        """Take note of an optimizer step, which changes nothing."""

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of an evaluation, the same on all ranks.

        Raises:
            RunError: the metric is not among them.
        """
        if self.metric not in metrics:
            raise RunError(
                key="scheduler.metric",
                happened=f"the evaluation has no {self.metric}, which the scheduler follows",
                expected=f"one of {', '.join(metrics)}",
            )
        self.scheduler.step(metrics[self.metric])

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rates, one for each group."""
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted, and the rates that the run began with."""
        return {**{name: getattr(self.scheduler, name) for name in _COUNTED}, "base_lrs": self._initial}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on counting; after the optimizer's state was loaded, whose rates follow the config's where these have changed."""
        for name in _COUNTED:
            setattr(self.scheduler, name, state_dict[name])
        for group, now, then in zip(self.scheduler.optimizer.param_groups, self._initial, state_dict["base_lrs"], strict=True):
            if now != then:
                group["lr"] = float(group["lr"]) * now / then
