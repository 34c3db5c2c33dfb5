"""Parameter groups: every parameter in exactly one, by pattern, by layer and by whether it is decayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import LossModule
from ddp_train.model.gpt import GPT
from ddp_train.model.mini_resnet import MiniResNet
from ddp_train.optimizer import muon
from ddp_train.optimizer.groups import freeze, parameter_groups, rate_factors
from tests.unit.optimizer.tiny import names, tiny


def test_matrices_are_decayed_and_biases_and_norms_are_not() -> None:
    model = tiny()
    decayed, others = parameter_groups(model, 0.1)
    assert names(model, decayed["params"]) == {"conv.weight", "embedding.weight", "hidden.weight"}
    assert names(model, others["params"]) == {"conv.bias", "hidden.bias", "norm.weight", "norm.bias", "output.bias"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = tiny()
    model.hidden.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(parameter) for name, parameter in model.named_parameters() if not name.startswith("hidden")}


def test_an_optimizer_without_weight_decay_gets_one_group_without_the_argument() -> None:
    (group,) = parameter_groups(tiny(), None)
    assert set(group) == {"params"}
    assert len(group["params"]) == 8


def test_without_decay_all_parameters_share_one_group_and_one_kernel() -> None:
    (group,) = parameter_groups(tiny(), 0.0)
    assert (group["weight_decay"], len(group["params"])) == (0.0, 8)
    assert len(muon(tiny(), adamw_weight_decay=0.0).param_groups) == 2


def test_no_group_is_empty() -> None:
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)


def listed(model: nn.Module, groups: list[dict[str, Any]]) -> list[tuple[str, set[str], dict[str, Any]]]:
    """Return the name, the parameters and the rest of each group."""
    return [
        (group["name"], names(model, group["params"]), {key: value for key, value in group.items() if key not in ("name", "params")})
        for group in groups
    ]


def test_groups_by_pattern_have_what_they_say_and_the_rest_comes_first() -> None:
    model = tiny()
    groups = {"table": {"match": "embedding", "lr": 0.5}, "plain": {"match": ["norm", "*.bias"], "weight_decay": 0.0, "lr": 0.25}}
    assert listed(model, parameter_groups(model, 0.1, groups=groups)) == [
        ("rest", {"conv.weight", "hidden.weight"}, {"weight_decay": 0.1}),
        ("table", {"embedding.weight"}, {"weight_decay": 0.1, "lr": 0.5}),
        ("plain", {"norm.weight", "norm.bias", "conv.bias", "hidden.bias", "output.bias"}, {"weight_decay": 0.0, "lr": 0.25}),
    ]


def test_the_first_group_that_matches_has_a_parameter() -> None:
    model = tiny()
    groups = {"biases": {"match": "*.bias", "lr": 0.5}, "hidden": {"match": "hidden", "lr": 0.25}}
    made = parameter_groups(model, None, groups=groups)
    assert [(name, found) for name, found, _ in listed(model, made)][1:] == [
        ("biases", {"conv.bias", "hidden.bias", "norm.bias", "output.bias"}),
        ("hidden", {"hidden.weight"}),
    ]
    every = [id(parameter) for group in made for parameter in group["params"]]
    assert sorted(every) == sorted(map(id, model.parameters()))  # each once
    torch.optim.AdamW(made)  # which takes the names too


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"a": {"match": "heads", "lr": 1.0}}, r"optimizer\.groups\.a\.match: 'heads' matches no parameter"),
        ({"a": {"match": ["norm", "nrom"], "lr": 1.0}}, r"'nrom' matches no parameter"),
        (
            {"a": {"match": "*", "lr": 1.0}, "b": {"match": "norm", "lr": 2.0}},
            r"groups\.b\.match: all parameters that it matches are in earlier groups \(a\)",
        ),
        (
            {"a": {"match": "*.bias", "weight_decay": 0.5}},
            r"groups\.a\.weight_decay: is 0\.5, and all parameters that it matches",
        ),
    ],
)
def test_a_group_that_comes_to_nothing_is_an_error(groups: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parameter_groups(tiny(), 0.1, groups=groups)


def test_what_is_frozen_is_in_no_group() -> None:
    model = tiny()
    groups = {"stem": {"match": ["conv", "embedding"], "freeze": True}, "norms": {"match": "norm", "lr": 0.5}}
    freeze(model, groups)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == {
        *("conv.weight", "conv.bias", "embedding.weight"),
    }
    found = listed(model, parameter_groups(model, None, groups=groups))
    assert [(name, each) for name, each, _ in found] == [
        ("rest", {"hidden.weight", "hidden.bias", "output.bias"}),
        ("norms", {"norm.weight", "norm.bias"}),
    ]
    model.norm.requires_grad_(False)
    with pytest.raises(ConfigError, match="all parameters that it matches are frozen"):
        parameter_groups(model, None, groups=groups)


def test_each_layer_has_a_rate_of_its_own_but_for_groups_with_theirs() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    made = parameter_groups(model, None, layer_decay=0.5, lr=0.8)
    assert [(rest["lr"], found) for _, found, rest in listed(model, made)] == [
        (0.8, {"head.weight", "head.bias"}),
        (0.4, {"body.1.weight", "body.1.bias"}),
        (0.2, {"body.0.weight", "body.0.bias"}),
        (0.1, {"stem.weight", "stem.bias"}),
    ]
    groups = {"stem": {"match": "stem", "lr": 7.0}, "biases": {"match": "*.bias", "weight_decay": 0.0}}
    made = parameter_groups(model, 0.1, groups=groups, layer_decay=0.5, lr=0.8)
    rates = [(name, rest["lr"], rest["weight_decay"]) for name, _, rest in listed(model, made)]
    assert rates == [
        *[("rest", lr, 0.1) for lr in (0.8, 0.4, 0.2)],
        *[("stem", 7.0, 0.1), ("stem", 7.0, 0.0)],
        *[("biases", lr, 0.0) for lr in (0.8, 0.4, 0.2)],
    ]


def test_an_objective_s_own_parameters_have_names_and_the_last_layer_s_rate() -> None:
    loss_module = LossModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(1, 1))  # type: ignore[arg-type]
    made = parameter_groups(loss_module, None, groups={"scale": {"match": "objective", "lr": 3.0}}, layer_decay=0.5, lr=1.0)
    assert [(group["name"], group["lr"]) for group in made] == [("rest", 1.0), ("rest", 0.5), ("scale", 3.0)]


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
    with pytest.raises(ConfigError, match=r"optimizer\.layer_decay: Linear has no sequence of layers"):
        rate_factors(nn.Linear(2, 2), 0.5)
