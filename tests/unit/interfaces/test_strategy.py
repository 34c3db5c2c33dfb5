"""Which rows of a tensor a rank has."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from ddp_train.interfaces import is_sharded, local_range, local_rows, num_replicas, num_shards, shard_like
from tests.unit.sharded_tensors import example, rank_of, sharded_among


def test_ranks_have_the_rows_that_follow_each_other_and_the_last_ones_may_have_none() -> None:
    whole = example(5, 3)
    for rank, (start, stop) in enumerate([(0, 6), (6, 12), (12, 15), (15, 15)]):
        with rank_of(rank, 4) as mesh:
            like = sharded_among(mesh, whole)
            assert is_sharded(like) and num_shards(like) == 4 and num_replicas(like) == 1
            assert local_range(like) == (start, stop)
            again = shard_like(whole, like)
            assert torch.equal(local_rows(again).reshape(-1), whole.reshape(-1)[start:stop])
            local_rows(again).zero_()  # a copy
            assert whole.sum() == example(5, 3).sum()
            local_rows(like).zero_()
            assert not like.to_local().any()  # type: ignore[attr-defined]  # its own memory


def test_with_replicas_two_ranks_have_the_same_rows() -> None:
    with rank_of(3, 4, replicas=2) as mesh:
        like = sharded_among(mesh, example(4, 2))
        assert (num_shards(like), num_replicas(like), local_range(like)) == (2, 2, (4, 8))


def test_a_whole_tensor_is_all_its_own() -> None:
    whole = example(2, 2)
    assert not is_sharded(whole) and not is_sharded(None)
    assert local_range(whole) == (0, 4) and num_shards(whole) == 1
    assert shard_like(whole, whole) is whole


def test_columns_are_refused() -> None:
    with rank_of(0, 2) as mesh, pytest.raises(ValueError, match="not sharded along its first dimension"):
        num_shards(DTensor.from_local(example(2, 2), mesh["shards_of_0"], [Shard(1)], run_check=False))
