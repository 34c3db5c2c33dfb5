"""The shares of the ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_train.checkpoint import codec
from ddp_train.checkpoint.layout import divide_shared, own_piece, pieces_between
from ddp_train.interfaces.strategy import shard_range
from tests.unit.checkpoint.tensors import TENSORS


@settings(max_examples=50, deadline=None)
@given(tensors=st.lists(TENSORS), size=st.integers(1, 7))
def test_every_byte_is_written_by_one_rank_and_the_shares_are_even(tensors: list[Tensor], size: int) -> None:
    leaves = [codec.leaf_of(f"shared.model.t{number}", tensor) for number, tensor in enumerate(tensors)]
    shares = divide_shared(leaves, size, written_in_shares=["model"])
    for leaf in leaves:
        pieces = [piece for share in shares for piece in share if piece.leaf == leaf]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == leaf.numel
    total = sum(leaf.num_bytes for leaf in leaves)
    assert all(abs(sum(piece.num_bytes for piece in share) - total / size) <= 32 for share in shares)


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), shards=st.integers(2, 5), replicas=st.integers(1, 3))
def test_of_a_tensor_that_is_cut_each_rank_writes_of_its_own_rows_and_every_element_is_written_once(
    shape: list[int], shards: int, replicas: int
) -> None:
    leaf, size = codec.Leaf("t", torch.float32, tuple(shape), None, shards), shards * replicas
    written = [(rank, piece) for rank in range(size) for piece in own_piece(leaf, rank, size)]
    assert sorted(number for _, piece in written for number in range(piece.start, piece.stop)) == list(range(leaf.numel))
    for rank, piece in written:
        low, high = shard_range(leaf.shape, shards, rank % shards)
        assert low <= piece.start < piece.stop <= high
    assert {(rank, piece) for rank, piece in pieces_between(leaf, 0, leaf.numel, size)} == set(written)
    middle = (leaf.numel // 3, leaf.numel // 2)
    overlapping = {(rank, piece) for rank, piece in written if piece.start < middle[1] and piece.stop > middle[0]}
    assert set(pieces_between(leaf, *middle, size)) == (overlapping if middle[0] < middle[1] else set())


def test_shards_that_do_not_divide_the_ranks_are_no_checkpoint() -> None:
    with pytest.raises(codec.StateError, match="3 shards on 4 ranks"):
        list(pieces_between(codec.Leaf("t", torch.float32, (6,), None, 3), 0, 6, 4))
