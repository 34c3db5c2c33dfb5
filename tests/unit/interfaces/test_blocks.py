"""Which parts of a model repeat, and which ones a config means."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import blocks_of, repeated_blocks
from ddp_train.model.gpt import GPT, CausalSelfAttention
from ddp_train.model.mini_resnet import MiniResNet
from ddp_train.model.mlp import MLP


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
