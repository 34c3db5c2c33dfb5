"""Components whose classes do not inherit from ours."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.interfaces import RankMemory, Strategy, adapted


class Own:
    """A strategy as somebody writes one who has never seen the base class."""

    has_local_weights = True

    def __init__(self) -> None:
        self.weights_are_equal = False
        self.shown = 3

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        return model


class Unfinished(Strategy):
    pass


def as_strategy(made: Any) -> Strategy:
    return adapted(Strategy, made, required=["prepare"])


def test_a_class_of_somebody_else_has_the_defaults_of_ours_for_what_it_lacks() -> None:
    own, model = Own(), nn.Linear(1, 1)
    strategy = as_strategy(own)
    assert strategy.prepare(model, torch.device("cpu"), 2) is model
    assert isinstance(strategy, Strategy)
    assert (strategy.has_local_weights, strategy.has_buckets, strategy.rank_memory(model, 2)) == (True, False, RankMemory())
    with strategy.no_sync(model):
        strategy.after_step(1)
    strategy.weights_are_equal = True
    assert own.weights_are_equal
    assert strategy.shown == 3  # type: ignore[attr-defined]
    assert type(strategy).__name__ == "Own"
    assert pickle.loads(pickle.dumps(strategy)).has_local_weights


@pytest.mark.parametrize("made", [object(), Unfinished()])
def test_what_has_no_default_is_named(made: Any) -> None:
    with pytest.raises(TypeError, match=r"lacks prepare \(ddp_train.interfaces.Strategy\)"):
        as_strategy(made)
