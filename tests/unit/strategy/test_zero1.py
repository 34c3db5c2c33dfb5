"""An optimizer that steps rows. Between processes: tests/distributed/test_strategies.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces.strategy import is_sharded, local_rows
from ddp_train.strategy.zero1 import Zero1
from tests.unit.sharded_tensors import rank_of


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(3, 5)
    made.scale = nn.Parameter(torch.ones(()))
    return made


def step(trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_step_on_shards_is_the_step_and_nobody_sees_them() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trained, plain, strategy = model(), model(), Zero1()
        optimizer, expected = (torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (trained, plain))
        shards = strategy.setup_optimizer(optimizer)
        for _ in range(2):
            step(trained, optimizer)
            step(plain, expected)
        assert optimizer.param_groups[0]["params"] == list(trained.parameters())
        for mine, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert is_sharded(optimizer.state[mine]["exp_avg"]) == bool(mine.ndim)
            assert is_sharded(shards.get(mine)) == bool(mine.ndim)
        again = torch.optim.AdamW(trained.parameters(), lr=0.1, fused=True)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        Zero1().setup_optimizer(again)
        step(trained, again)
        step(plain, expected)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(trained.parameters(), plain.parameters(), strict=True))
    finally:
        dist.destroy_process_group()


def test_a_rank_keeps_the_state_of_its_rows_alone() -> None:
    with rank_of(3, 4):
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters())
        Zero1().setup_optimizer(optimizer)
        step(trained, optimizer)
        kept: dict[Tensor, Tensor] = {parameter: local_rows(state["exp_avg"]) for parameter, state in optimizer.state.items()}  # type: ignore[misc]
        assert [len(kept[parameter]) for parameter in trained.parameters() if parameter.ndim] == [0, 0]  # 5 rows: 2, 2, 1, 0


def test_an_optimizer_with_other_weights_to_evaluate_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    with pytest.raises(ConfigError, match="other weights to evaluate"):
        Zero1().setup_optimizer(ScheduleFree(model().parameters(), lr=0.1))
