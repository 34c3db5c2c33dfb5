"""A model without values, for a rank that takes rank 0's: only where it is the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.training.build.without_values import has_values, make_without_values
from ddp_train.training.seeding import seed_all
from tests.unit.rig.cases import _SMALL, model


class Made(nn.Linear):
    """Does something more when it is made."""

    def __init__(self, more: Callable[[Any], None]) -> None:
        super().__init__(4, 4)
        more(self)


class OwnKind(nn.Parameter):
    """A parameter that is more than one."""


OTHERS: dict[str, Callable[[Any], Any]] = {
    "reads a value": lambda made: setattr(made, "scale", float(made.weight.std())),
    "keeps a tensor": lambda made: setattr(made, "table", torch.arange(4)),
    "keeps one in a list": lambda made: setattr(made, "tables", [torch.arange(4)]),
    "draws on a device that it names": lambda made: made.register_buffer("noise", torch.rand(4, device="cpu")),
    "parameters of another class": lambda made: setattr(made, "weight", OwnKind(made.weight.data)),
    "fails": lambda made: 1 // 0,
}
SAME: dict[str, Callable[[Any], Any]] = {
    "a buffer": lambda made: made.register_buffer("table", torch.rand(4), persistent=False),
    "tied": lambda made: setattr(made, "again", made.weight),
    "a parameter of its own": lambda made: setattr(made, "token", nn.Parameter(torch.randn(1, 4) * 0.02)),
    "initialised anew": lambda made: nn.init.orthogonal_(made.weight),
}


def made(more: Callable[[Any], Any]) -> nn.Module | None:
    def make() -> nn.Module:
        seed_all(0)
        return Made(more)

    return make_without_values(make)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_would_be_another_one_is_made_with_values(name: str) -> None:
    assert made(OTHERS[name]) is None


@pytest.mark.parametrize("name", SAME)
def test_parameters_and_buffers_need_no_values(name: str) -> None:
    found = made(SAME[name])
    assert found is not None
    assert all(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))


@pytest.mark.parametrize("name", _SMALL)
def test_our_models_need_none(name: str) -> None:
    def make() -> nn.Module:
        seed_all(0)
        return model(name)

    found = make_without_values(make)
    assert found is not None and not has_values(found)
