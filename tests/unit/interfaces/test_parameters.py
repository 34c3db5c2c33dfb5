"""The names of parameters, the patterns that choose some, and which parts of a model repeat."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import LossModule
from ddp_train.interfaces.parameters import blocks_of, matching, named_parameters, repeated_blocks
from ddp_train.model.gpt import GPT, CausalSelfAttention
from ddp_train.model.mini_resnet import MiniResNet
from ddp_train.model.mlp import MLP

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias", "header.weight"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["head"], {"head.weight", "head.bias"}),  # not `header`
        (["head.bias"], {"head.bias"}),
        (["*.bias", "body.1"], {"body.0.bias", "head.bias", "body.1.weight"}),
        (["body.[01]"], {"body.0.weight", "body.0.bias", "body.1.weight"}),
        (["*"], set(NAMES)),
    ],
)
def test_a_pattern_chooses_by_the_name_of_a_parameter_or_of_a_module_around_it(patterns: list[str], expected: set[str]) -> None:
    assert matching(NAMES, patterns, key="any") == expected


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.groups.a.match: 'haed' matches no parameter"):
        matching(NAMES, ["body", "haed"], key="optimizer.groups.a.match")


def test_parameters_have_the_names_of_the_model_whatever_is_around_it() -> None:
    class Scaled(nn.Linear):
        """Stands for an objective with weights."""

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    own = ["0.weight", "0.bias", "1.bias"]
    assert list(named_parameters(model)) == own
    loss_module = LossModule(model, Scaled(1, 1))  # type: ignore[arg-type]
    assert list(named_parameters(loss_module)) == [*own, "objective.weight", "objective.bias"]


def test_transformer_layers_and_residual_blocks_repeat() -> None:
    gpt = GPT(10, 4, num_layers=3, num_heads=1, width=4)
    assert repeated_blocks(gpt) == {f"blocks.{number}": gpt.blocks[number] for number in range(3)}
    assert list(repeated_blocks(MiniResNet((3, 8, 8), 10, width=2, blocks_per_stage=1))) == [f"blocks.{number}" for number in range(3)]
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 2, enable_nested_tensor=False)
    assert list(repeated_blocks(layers)) == ["layers.0", "layers.1"]


def test_single_layers_one_block_and_what_is_inside_a_block_do_not() -> None:
    assert repeated_blocks(MLP((1, 2, 2), 10, width=4)) == {}
    assert repeated_blocks(GPT(10, 4, num_layers=1, num_heads=1, width=4)) == {}
    inner = [nn.Sequential(nn.Linear(2, 2)) for _ in range(4)]
    nested = nn.ModuleList([nn.ModuleDict({"parts": nn.ModuleList(inner[:2])}), nn.ModuleDict({"parts": nn.ModuleList(inner[2:])})])
    assert len(repeated_blocks(nested)) == 4  # containers are none


def test_classes_are_chosen_by_name_the_outermost_alone() -> None:
    gpt = GPT(10, 4, num_layers=2, num_heads=1, width=4)
    assert list(blocks_of(gpt, ["CausalSelfAttention"], key="k")) == ["blocks.0.attention", "blocks.1.attention"]
    assert list(blocks_of(gpt, ["Block", CausalSelfAttention.__name__], key="k")) == ["blocks.0", "blocks.1"]
    assert blocks_of(gpt, "auto", key="k") == repeated_blocks(gpt)


def test_a_class_that_the_model_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"k: the GPT has no module of a class Layer(.|\n)*Block, CausalSelfAttention, FeedForward"):
        blocks_of(GPT(10, 4, num_layers=2, num_heads=1, width=4), ["Layer"], key="k")
