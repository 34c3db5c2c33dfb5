"""The codec of checkpoints: what goes in comes out, bit for bit, and what cannot is refused by its place."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_train.checkpoint import codec
from tests.unit.checkpoint.tensors import TENSORS

_KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.tuples(st.integers(), st.text()))
_STATES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), TENSORS),
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(), inner), st.dictionaries(_KEYS, inner)),
)


def same(one: Any, other: Any) -> bool:
    """Compare two states by type and by bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@settings(max_examples=60, deadline=None)
@given(state=_STATES)
def test_any_state_comes_back_bit_for_bit(state: Any) -> None:
    plain, tensors = codec.encode({"a": state}, "root")
    text = json.dumps(plain, allow_nan=False)
    assert same(codec.decode(json.loads(text), tensors), {"a": state})
    assert {name: leaf.shape for name, leaf in codec.tensor_leaves(plain).items()} == {name: each.shape for name, each in tensors.items()}


def test_tied_tensors_are_written_once_and_are_one_again() -> None:
    weight = torch.rand(3, 4)
    plain, tensors = codec.encode({"embedding": weight, "head": nn.Parameter(weight), "part": weight[0]}, "model")
    assert list(tensors) == ["model.embedding", "model.part"]
    state = codec.decode(plain, tensors)
    assert state["embedding"] is state["head"]


def test_permuted_memory_stays_permuted() -> None:
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    plain, tensors = codec.encode({"images": images, "gaps": torch.rand(4, 6)[:, ::2]}, "x")
    state = codec.decode(plain, {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert state["images"].stride() == images.stride()
    assert torch.equal(state["images"], images)
    assert state["gaps"].is_contiguous()


class Weird:
    pass


@pytest.mark.parametrize(
    "value",
    [Weird(), {1, 2}, 1j, torch.Size([2]), torch.rand(2).to_sparse(), torch.empty(2, device="meta"), OrderedDict({Weird(): 1}), print],
)
def test_what_a_checkpoint_cannot_hold_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(codec.StateError, match=r"rank\.data\.readers\.1"):
        codec.encode({"data": {"readers": [0, value]}}, "rank")


@pytest.mark.parametrize(
    "plain",
    [
        {"$tensor": "a"},
        {"$tensor": "a", "dtype": "load", "shape": []},
        {"$tensor": "a", "dtype": "float32", "shape": [-1]},
        {"$tensor": "a", "dtype": "float32", "shape": [2], "stride": [1 << 40]},
        {"$tensor": "missing", "dtype": "float32", "shape": [2]},
        {"$dict": [[[1], 2]]},
        {"$dict": 3},
        {"$float": "one"},
        {"$import": "os"},
    ],
)
def test_a_plain_part_that_nobody_has_encoded_is_refused(plain: Any) -> None:
    with pytest.raises(codec.StateError, match="a checkpoint says"):
        codec.decode([plain], {"a": torch.rand(2)})
