"""What the run gives to components within a component."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Objective
from ddp_train.training.instantiate import instantiate

LINEAR = {"_target_": "torch.optim.lr_scheduler.LinearLR", "start_factor": 0.5, "total_iters": 2}
DECAY = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5, "_partial_": True}


class Around:
    """An optimizer around another one, as averages and look-aheads are."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self.optimizer, self.steps = optimizer, steps


class Doubled:
    """Makes its own, of a class that it is given."""

    def __init__(self, params: Any, base: Callable[..., Optimizer]) -> None:
        self.base = base
        self.optimizer = base(params)


def sgd() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)


def rates(optimizer: Optimizer, schedule: Any) -> list[float]:
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_inside_a_schedule_have_the_same_optimizer() -> None:
    optimizer = sgd()
    scheduler = {"_target_": "torch.optim.lr_scheduler.SequentialLR", "_partial_": True, "schedulers": [LINEAR, DECAY], "milestones": [2]}
    made = instantiate(scheduler, key="scheduler", run_object=optimizer)
    assert isinstance(made, SequentialLR)
    assert all(each.optimizer is optimizer for each in (made, *made._schedulers))
    assert rates(optimizer, made) == [0.5, 0.75, 1.0, 0.5]


def test_a_schedule_that_holds_one_which_waits_waits_too() -> None:
    optimizer = sgd()
    inner = {"_target_": "torch.optim.lr_scheduler.ChainedScheduler", "schedulers": [DECAY]}  # needs no optimizer itself
    scheduler = {"_target_": "torch.optim.lr_scheduler.ChainedScheduler", "_partial_": True, "schedulers": [LINEAR, inner]}
    made = instantiate(scheduler, key="scheduler", run_object=optimizer)
    assert isinstance(made, ChainedScheduler)
    assert rates(optimizer, made) == [0.5, 0.375, 0.25, 0.125]


def test_an_optimizer_inside_another_one_has_the_parameters_and_a_partial_stays_one() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]}]
    inner = {"_target_": "torch.optim.SGD", "lr": 0.1}
    around = instantiate({"_target_": f"{__name__}.Around", "optimizer": inner, "steps": 5}, key="optimizer", run_object=groups)
    assert isinstance(around.optimizer, SGD) and around.optimizer.param_groups[0]["params"] == groups[0]["params"]
    doubled = instantiate({"_target_": f"{__name__}.Doubled", "base": {**inner, "_partial_": True}}, key="optimizer", run_object=groups)
    assert isinstance(doubled.base, functools.partial)
    assert doubled.optimizer.param_groups[0]["lr"] == 0.1


class Unfinished(Objective):
    """Lacks `loss`."""


class Failing:
    def __init__(self) -> None:
        raise TypeError("the user's own")


def test_a_call_that_does_not_fit_is_told_with_its_key_and_an_error_of_the_component_stays() -> None:
    with pytest.raises(ConfigError, match=r"^objective: .*Unfinished: .*abstract class Unfinished"):
        instantiate({"_target_": f"{__name__}.Unfinished"}, key="objective")
    with pytest.raises(ConfigError, match=r"^callbacks\.a: .*Around: .*missing 1 required positional argument: 'steps'"):
        instantiate({"_target_": f"{__name__}.Around", "optimizer": None}, key="callbacks.a")
    with pytest.raises(TypeError, match="the user's own"):
        instantiate({"_target_": f"{__name__}.Failing"}, key="model")
