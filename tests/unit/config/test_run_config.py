"""Rates that follow the global batch, from the keys to the first step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ddp_train.errors import ConfigError, ConfigErrors
from tests.unit.parts import checked, components

SQRT = ("trainer.global_batch_size=128", "optimizer.lr_scale=sqrt", "optimizer.base_batch_size=32", "optimizer.lr=0.01")
LINEAR = [word.replace("sqrt", "linear") for word in SQRT]


def rates(*overrides: str) -> list[float]:
    return [float(group["lr"]) for group in components(*overrides).optimizer.param_groups]


def test_all_rates_follow_the_global_batch() -> None:
    own = "+optimizer.groups.bias={match: '*.bias', lr: 0.5}"
    assert rates("scheduler=constant", *SQRT, own) == pytest.approx([0.02, 1.0])
    assert rates("scheduler=constant", "optimizer=sgd", *LINEAR, own) == pytest.approx([0.04, 2.0])
    assert rates("scheduler=constant", "optimizer=muon", *SQRT, "optimizer.adamw_lr=0.003") == pytest.approx([0.02, *[0.006] * 2])
    assert rates("scheduler=constant", *(word.replace("=128", "=32") for word in SQRT)) == pytest.approx([0.01, 0.01])


def test_the_schedule_goes_from_the_scaled_rate() -> None:
    parts = components(*SQRT, "scheduler=warmup_linear", "scheduler.warmup_steps=1", "trainer.max_steps=3")
    assert parts.scheduler.get_last_lr() == pytest.approx([0.01, 0.01])
    assert [group["initial_lr"] for group in parts.optimizer.param_groups] == pytest.approx([0.02, 0.02])


def test_what_it_comes_to_is_said() -> None:
    (line,) = checked(*SQRT).batch_notes()
    assert line == "all rates of the optimizer x 2: 0.01 becomes 0.02 (optimizer.lr_scale=sqrt, 128 / optimizer.base_batch_size 32)"
    assert checked().batch_notes() == []


def test_a_batch_that_follows_the_number_of_ranks_is_said() -> None:
    several = checked("cluster.processes_per_node=3", "loader.micro_batch_size=8")
    assert several.batch_notes() == ["another number of ranks changes the batch and the result; trainer.global_batch_size=24 keeps both"]
    assert checked("cluster.processes_per_node=3", "trainer.global_batch_size=24").batch_notes() == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optimizer.lr_scale=cubic", "optimizer.base_batch_size=1"], r"lr_scale: is 'cubic'"),
        (["optimizer.lr_scale=linear"], r"base_batch_size: is not given, and optimizer\.lr_scale is linear"),
        (["optimizer.base_batch_size=32"], r"lr_scale: is not given, and optimizer\.base_batch_size is 32"),
        (["optimizer.lr_scale=linear", "optimizer.base_batch_size=0"], r"base_batch_size: is 0"),
        ([*SQRT, "trainer.batch_size_schedule={4: 64}"], r"lr_scale: is sqrt, and trainer\.batch_size_schedule has several sizes"),
        (
            [*SQRT, "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "+scheduler.max_lr=0.1"],
            r"scheduler\.max_lr: sets the rate itself",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors, match=says):
        checked(*overrides)


class Finding(torch.optim.SGD):
    """Finds its rate itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        for group in self.param_groups:
            group["lr"] = None


def test_an_optimizer_without_a_rate_is_refused() -> None:
    bare = [
        f"optimizer._target_={__name__}.Finding",
        *(f"~optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "fused")),
        *SQRT[:3],
    ]
    with pytest.raises(ConfigError, match=r"lr_scale: is given, and a Finding sets its learning rate itself"):
        components(*bare)


def test_square_root_is_the_root_of_linear() -> None:
    assert checked(*SQRT).rate_factor() == math.sqrt(checked(*LINEAR).rate_factor()) == 2
