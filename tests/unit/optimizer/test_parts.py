"""Several optimizers behind one: each has its own parameters, and a checkpoint sees one."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.optimizer.parts import several

PARTS = {"0": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "1": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.2)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


def test_each_part_steps_by_its_own_rule_and_biases_are_not_decayed() -> None:
    network, other = model(), model()
    optimizer = several(network, parts=PARTS)
    apart = [torch.optim.SGD(other[0].parameters(), lr=0.1, momentum=0.9)]
    groups = [{"params": [other[1].weight], "weight_decay": 0.2}, {"params": [other[1].bias], "weight_decay": 0.0}]
    apart.append(torch.optim.AdamW(groups, lr=0.01))  # type: ignore[arg-type]
    for _ in range(3):
        step(network, optimizer)
        other.zero_grad()
        other(torch.ones(5, 3)).square().sum().backward()
        for each in apart:
            each.step()
    assert all(torch.equal(left, right) for left, right in zip(network.parameters(), other.parameters(), strict=True))


def test_its_state_is_that_of_one_optimizer() -> None:
    network = model()
    optimizer = several(network, parts=PARTS)
    step(network, optimizer)
    again = copy.deepcopy(network)
    loaded = several(again, parts=PARTS)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(network, optimizer)
    step(again, loaded)
    assert all(torch.equal(left, right) for left, right in zip(network.parameters(), again.parameters(), strict=True))


def test_every_parameter_is_in_one_part() -> None:
    with pytest.raises(ConfigError, match=r"2 parameters are in no part: 1\.weight, 1\.bias"):
        several(model(), parts={"0": PARTS["0"]})
    with pytest.raises(ConfigError, match=r"has 0\.bias, and a part before it has it"):
        several(model(), parts={**PARTS, "*.bias": PARTS["1"]})


class WithModes(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_part_with_modes_is_refused_and_not_trained_without_them() -> None:
    with pytest.raises(ConfigError, match="WithModes has other weights to evaluate"):
        several(nn.Linear(2, 2), parts={"*": partial(WithModes, lr=0.1)})
