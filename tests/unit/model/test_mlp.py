"""A perceptron for images."""

from __future__ import annotations

import torch

from ddp_train.model.mlp import MLP


def test_mlp_has_as_many_hidden_layers_as_asked_for() -> None:
    assert len(MLP((1, 2, 2), 3, depth=5).hidden) == 5
    assert MLP((1, 2, 2), 3, depth=0)(torch.zeros(1, 1, 2, 2)).shape == (1, 3)
