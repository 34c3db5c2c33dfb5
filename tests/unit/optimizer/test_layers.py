"""The layers of models as people build them."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.model.gpt import GPT
from ddp_train.model.mini_resnet import MiniResNet
from ddp_train.optimizer.layers import rate_factors


def numbers(model: nn.Module) -> dict[str, float]:
    """Return how many layers each module is below the last one."""
    factors = rate_factors(model, 0.5)
    found: dict[str, set[float]] = {}
    for name, factor in factors.items():
        parts = name.split(".")
        found.setdefault(".".join(parts[:2]) if parts[1:2] and parts[1].isdigit() else parts[0], set()).add(factor)
    assert all(len(each) == 1 for each in found.values()), found
    return {name: {1.0: 0, 0.5: 1, 0.25: 2, 0.125: 3}[factor] for name, (factor,) in found.items()}


def test_a_transformer_has_its_embeddings_below_its_blocks_and_its_norm_above() -> None:
    gpt = GPT(vocab_size=8, context_length=4, num_layers=2, num_heads=1, width=4)
    assert numbers(gpt) == {"token_embedding": 3, "position_embedding": 3, "blocks.0": 2, "blocks.1": 1, "norm": 0}


def test_sequences_inside_a_layer_are_a_part_of_it() -> None:
    block = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    assert numbers(nn.Sequential(nn.ReLU(), block, nn.Linear(2, 2))) == {"1": 1, "2": 0}


def test_names_of_compiled_layers_are_plain() -> None:
    wrapped = nn.ModuleDict({"_orig_mod": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    assert numbers(nn.ModuleDict({"body": wrapped})) == {"body.0": 1, "body.1": 0}


def test_a_norm_goes_with_the_layer_before_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2))
    assert numbers(model) == {"0": 1, "1": 1, "4": 0}


def test_several_sequences_are_one_after_another() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), "b": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))})
    assert numbers(model) == {"a.0": 3, "a.1": 2, "b.0": 1, "b.1": 0}


def test_a_residual_network_counts_its_stages() -> None:
    factors = rate_factors(MiniResNet(image_shape=[3, 8, 8], num_classes=3, width=2, blocks_per_stage=1), 0.5)
    picked = ["stem.0.weight", "stem.1.weight", "blocks.0.conv1.weight", "blocks.2.shortcut.0.weight", "head.bias"]
    assert [factors[name] for name in picked] == [1 / 16, 1 / 16, 1 / 8, 1 / 2, 1.0]


def test_a_model_without_layers_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.layer_decay: Linear has no layers one after another"):
        rate_factors(nn.Linear(2, 2), 0.5)
