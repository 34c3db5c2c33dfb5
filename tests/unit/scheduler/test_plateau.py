"""The rate that follows a metric: what is counted comes back, and what the config changes counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_train.errors import RunError
from ddp_train.scheduler.plateau import Plateau


def plateau(lr: float = 1.0, **changes: Any) -> Plateau:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
    return Plateau(ReduceLROnPlateau(optimizer, **{"factor": 0.5, "patience": 1, **changes}), "loss")


def rates(scheduler: Plateau, losses: list[float]) -> list[Any]:
    """Return the rate after each evaluation."""
    found = []
    for loss in losses:
        scheduler.step()  # of the optimizer, in between
        scheduler.follow({"accuracy": 0.5, "loss": loss})
        found += scheduler.get_last_lr()
    return found


def test_the_rate_is_cut_when_the_metric_gets_no_better() -> None:
    assert rates(plateau(), [3.0, 2.0, 2.0, 2.0, 2.0, 1.0]) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("cut", range(6))
def test_counting_goes_on_after_a_resume(cut: int) -> None:
    losses = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    first, second = plateau(), plateau()
    before = rates(first, losses[:cut])
    second.scheduler.optimizer.load_state_dict(first.scheduler.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert before + rates(second, losses[cut:]) == rates(plateau(), losses)


def test_a_patience_and_a_rate_that_were_changed_count() -> None:
    first, second = plateau(), plateau(lr=4.0, patience=9)
    assert rates(first, [2.0, 2.0, 2.0]) == [1.0, 1.0, 0.5]
    second.scheduler.optimizer.load_state_dict(first.scheduler.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates(second, [2.0, 2.0, 2.0]) == [2.0, 2.0, 2.0]


def test_a_metric_that_the_evaluation_does_not_have_is_named() -> None:
    with pytest.raises(RunError, match=r"scheduler\.metric: the evaluation has no loss(.|\n)*one of accuracy"):
        plateau().follow({"accuracy": 1.0})
