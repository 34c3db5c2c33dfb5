"""Regression: the three losses, and metrics that are those of the whole set whatever the batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.objective.regression import Regression
from tests.unit.objective.batches import IDENTITY, reported


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randn(shape, dtype=torch.float64)
    return targets + 0.3 * torch.randn(shape, dtype=torch.float64), targets


def metrics(*parts: tuple[Tensor, Tensor]) -> dict[str, float]:
    return reported(Regression(), IDENTITY, *parts)


@pytest.mark.parametrize(
    ("criterion", "expected"), [("mse", F.mse_loss), ("mae", F.l1_loss), ("huber", lambda *pair: F.huber_loss(*pair, delta=0.2))]
)
def test_the_loss_of_a_sample_is_the_mean_over_its_numbers(criterion: Any, expected: Any) -> None:
    batch = numbers(12, 3)
    losses = Regression(criterion=criterion, huber_delta=0.2).loss(IDENTITY, batch)
    assert isinstance(losses, Tensor) and losses.shape == (12,)
    assert losses.mean().item() == pytest.approx(expected(*batch).item())


def test_rmse_mae_and_r2_are_those_of_the_whole_set() -> None:
    outputs, targets = numbers(12)
    found = metrics((outputs[:5], targets[:5]), (outputs[5:, None], targets[5:]))
    spread = (targets - targets.mean()).square().sum()
    assert found == {
        "rmse": pytest.approx(math.sqrt(F.mse_loss(outputs, targets))),
        "mae": pytest.approx(F.l1_loss(outputs, targets).item()),
        "r2": pytest.approx(1 - ((outputs - targets).square().sum() / spread).item()),
        "loss": pytest.approx(F.mse_loss(outputs, targets).item()),
    }
    assert list(found) == list(Regression.goals)


def test_r2_of_several_numbers_is_their_mean_and_of_equal_targets_0_or_1() -> None:
    outputs, targets = numbers(12, 2)
    each = [metrics((outputs[:, place], targets[:, place]))["r2"] for place in (0, 1)]
    assert metrics((outputs, targets))["r2"] == pytest.approx(sum(each) / 2)
    same = torch.full((4,), 7.0)
    assert metrics((same, same))["r2"] == 1.0
    assert metrics((same + 1, same))["r2"] == 0.0


def test_shapes_that_torch_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives \[12, 2\] for targets of shape \[12\]"):
        Regression().loss(IDENTITY, (torch.zeros(12, 2), torch.zeros(12)))
    assert Regression().infer(IDENTITY, torch.zeros(12, 1))["prediction"].shape == (12,)
