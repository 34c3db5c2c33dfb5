"""The shares of the ranks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_train.checkpoint import codec
from ddp_train.checkpoint.partition import divide
from tests.unit.checkpoint.tensors import TENSORS


@settings(max_examples=50, deadline=None)
@given(tensors=st.lists(TENSORS), size=st.integers(1, 7))
def test_every_byte_is_written_by_one_rank_and_the_shares_are_even(tensors: list[Tensor], size: int) -> None:
    leaves = [codec.leaf_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    shares = divide(leaves, size)
    for leaf in leaves:
        pieces = [piece for share in shares for piece in share if piece.leaf == leaf]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == leaf.numel
    total = sum(leaf.num_bytes for leaf in leaves)
    assert all(abs(sum(piece.num_bytes for piece in share) - total / size) <= 32 for share in shares)
