"""Which rank's copy of the model differs, and in which tensor; here with the sums of other ranks made up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World, alone
from ddp_train.training.replica_check import FingerprintCheck, ReplicaCheck, ReplicaError
from tests.unit.parts import components, trainer


@dataclass(frozen=True, kw_only=True)
class Fleet(World):
    """Rank 0 of several whose models are copies, of which some were changed."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    changes: dict[int, dict[str, str]] = field(default_factory=dict)  # of what a rank says of its other parts

    def gather_rows(self, values: Tensor) -> Tensor:
        checks = [
            FingerprintCheck(model, alone(), every_steps=1, optimizer=optimizer, others=dict)
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        tensors = [{**check._parameters, **check._kept(), **check._buffers} for check in checks]
        rows = torch.cat([check._gather(each) for check, each in zip(checks, tensors, strict=True)])
        return rows[:, -len(values) :]

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [{**value, **self.changes.get(rank, {})} for rank in range(self.size)]
        return [f"node{rank}" for rank in range(self.size)]


def fleet(size: int) -> Fleet:
    models = []
    for _ in range(size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 2, dtype=torch.bfloat16))
        model.register_buffer("table", torch.ones(3, dtype=torch.bool))
        models.append(model)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return Fleet(rank=0, size=size, local_rank=0, local_size=size, device=torch.device("cpu"), models=models, optimizers=optimizers)


def check_of(world: Fleet, *, every_steps: int = 1) -> FingerprintCheck:
    others = lambda: {"scheduler": "a", "scaler": "b"}  # noqa: E731
    return FingerprintCheck(world.models[0], world, every_steps=every_steps, optimizer=world.optimizers[0], others=others)


def flip_a_bit(tensor: Tensor, place: int, bit: int) -> None:
    tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten()[place] ^= 1 << bit


def test_the_loop_tells_it_of_every_step() -> None:
    told: list[int] = []

    class Told(ReplicaCheck):
        def after_step(self, step: int) -> None:
            told.append(step)

    trainer(components("trainer.max_steps=3"), replicas=Told()).train()
    assert told == [1, 2, 3]


@pytest.mark.parametrize(("name", "place", "bit"), [("0.weight", 1199, 0), ("2.bias", 1, 14), ("table", 0, 0)])
def test_one_bit_on_one_rank_is_found_and_named(name: str, place: int, bit: int) -> None:
    world = fleet(4)
    check = check_of(world, every_steps=5)
    check.after_step(5)
    flip_a_bit(world.models[2].get_parameter(name) if name != "table" else world.models[2].get_buffer(name), place, bit)
    check.after_step(6)
    with pytest.raises(ReplicaError, match=re.escape(f"after step 10: rank 2 on node2 differs from the others in {name}\n")):
        check.after_step(10)
    with pytest.raises(ReplicaError):
        check.before_save(7)


def test_a_bit_of_the_optimizer_is_found_before_it_has_moved_a_weight() -> None:
    world = fleet(3)
    check = check_of(world)
    check.after_step(1)
    flip_a_bit(world.optimizers[1].state[world.models[1].get_parameter("0.bias")]["exp_avg_sq"], 7, 2)
    with pytest.raises(ReplicaError, match=r"rank 1 on node1 differs from the others in exp_avg_sq of 0\.bias"):
        check.after_step(2)


def test_a_schedule_and_tensors_that_one_rank_alone_has_are_named() -> None:
    world = fleet(3)
    check = check_of(world)
    world.changes[2] = {"scheduler": "c"}
    with pytest.raises(ReplicaError, match=r"rank 2 on node2 differs from the others in scheduler"):
        check.after_step(1)
    world.changes[2] = {"optimizer's tensors": "exp_avg of 0.bias"}
    with pytest.raises(ReplicaError, match=r"rank 2 on node2 differs from the others in optimizer's tensors"):
        check.after_step(2)


def test_two_ranks_differ_and_nobody_knows_which_is_right() -> None:
    world = fleet(2)
    check = check_of(world)
    flip_a_bit(world.models[1].get_parameter("0.bias"), 0, 3)
    with pytest.raises(ReplicaError, match=r"the ranks differ in 0\.bias, and no majority"):
        check.after_step(1)


def test_averages_that_each_rank_has_of_its_own_are_left_out() -> None:
    world = fleet(3)
    check = check_of(world)
    for rank, model in enumerate(world.models):
        model[1](torch.full((2, 300), float(rank)))
    check.after_step(1)
