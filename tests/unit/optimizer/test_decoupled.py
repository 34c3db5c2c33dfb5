"""SGD by numbers that hardly depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.optimizer import decoupled_sgd
from tests.unit.optimizer.tiny import names


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LayerNorm(2))


def moved(momentum: float, lr: float, weight_decay: float, gradient: float) -> tuple[float, float]:
    """Return how far a weight of about 1 goes in a late step under a gradient that stays the same, and a batch norm's bias."""
    net = model()
    optimizer = decoupled_sgd(net, lr=lr, momentum=momentum, weight_decay=weight_decay, norm_bias_scale=4.0)
    weight, bias = net.get_parameter("0.weight"), net.get_parameter("1.bias")
    for _ in range(200):
        before = weight.detach().clone(), bias.detach().clone()
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        with torch.no_grad():
            steps = (weight - before[0]).mean().item(), (bias - before[1]).mean().item()
            weight.fill_(1.0)
            bias.fill_(1.0)
    return steps


@pytest.mark.parametrize("momentum", [0.5, 0.85, 0.95])
def test_a_step_has_the_length_of_the_rate_over_two_minus_the_momentum(momentum: float) -> None:
    length = 0.01 / (2 - momentum)
    assert moved(momentum, lr=0.01, weight_decay=0.0, gradient=1.0) == pytest.approx((-length, -4 * length), rel=1e-3)


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_a_step_takes_the_decays_share_of_all_weights_away_whatever_the_rate(lr: float) -> None:
    share = 0.002 / (2 - 0.85)
    assert moved(0.85, lr=lr, weight_decay=0.002, gradient=0.0) == pytest.approx((-share, -share), rel=1e-3)


def test_only_the_biases_of_batch_norms_have_a_rate_of_their_own() -> None:
    net = model()
    net.get_parameter("1.weight").requires_grad_(False)
    groups = decoupled_sgd(net).param_groups
    assert [names(net, group["params"]) for group in groups] == [{"0.weight", "0.bias", "2.weight", "2.bias"}, {"1.bias"}]
    assert groups[1]["lr"] == pytest.approx(64 * groups[0]["lr"])
    assert len(decoupled_sgd(nn.Linear(2, 2)).param_groups) == 1


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"momentum": 0.0}, {"lr": 0.0}, {"norm_bias_scale": 0.0}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{next(iter(wrong))}"):
        decoupled_sgd(model(), **wrong)
