"""Which rows of a tensor a rank has; strategies whose classes do not inherit from ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ddp_train.interfaces.strategy import (
    AdaptedStrategy,
    RankMemory,
    Strategy,
    is_sharded,
    local_range,
    local_rows,
    num_replicas,
    num_shards,
    shard_like,
)
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


class Own:
    """A strategy as somebody writes one who has never seen the base class."""

    state_is_per_rank = True

    def __init__(self) -> None:
        self.param_dtype = torch.bfloat16

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        return model

    def zeroes_gradients_in_place(self, wrapped: nn.Module) -> bool:
        return True


def test_a_class_of_somebody_else_has_the_defaults_of_ours_for_what_it_lacks() -> None:
    model, strategy = nn.Linear(1, 1), AdaptedStrategy(Own())
    assert strategy.prepare(model, torch.device("cpu"), 2) is model
    assert (strategy.state_is_per_rank, strategy.param_dtype, strategy.zeroes_gradients_in_place(model)) == (True, torch.bfloat16, True)
    assert (strategy.has_buckets, strategy.weights_are_per_rank, strategy.rank_memory(model, 2)) == (False, False, RankMemory())
    with strategy.no_sync(model), strategy.mean_over_ranks(model, []) as own_values:
        assert own_values == {}
        strategy.reduce_gradients(model, 1)


def test_a_strategy_without_prepare_is_refused_by_that_name() -> None:
    class Unfinished(Strategy):
        pass

    with pytest.raises(TypeError, match=r"Unfinished.*prepare"):
        Unfinished()  # type: ignore[abstract]
