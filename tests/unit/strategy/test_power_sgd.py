"""What a PowerSGD step leaves in the place of the gradients; here the ranks are threads. Between processes: tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.strategy.power_sgd import PowerSGD
from tests.unit.strategy.conftest import SIZE

Ranks = Callable[[Callable[[int], Any]], list[Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(12, 10))
        self.kernel = nn.Parameter(torch.zeros(8, 3, 3, 3).to(memory_format=torch.channels_last))
        self.small = nn.Parameter(torch.zeros(2, 3))
        self.bias = nn.Parameter(torch.zeros(12))
        self.frozen = nn.Parameter(torch.zeros(12, 10), requires_grad=False)


def strategy_of(rank: int = 2, from_step: int = 0) -> PowerSGD:
    made = PowerSGD(rank=rank, from_step=from_step)
    made._size = SIZE
    return made


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    stream = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(each.shape, generator=stream) for name, each in Net().named_parameters() if each.requires_grad}


def put(net: Net, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        parameter = net.get_parameter(name)
        parameter.grad = torch.empty_like(parameter).copy_(value)  # laid out as the parameter is


def reduced(strategy: PowerSGD, rank: int, steps: int, first: int = 0) -> list[dict[str, Tensor]]:
    net, found = Net(), []
    for step in range(first, first + steps):
        put(net, gradients(step, rank))
        strategy.reduce_gradients(net, step)
        found.append({name: each.grad.clone() for name, each in net.named_parameters() if each.grad is not None})
    return found


def mean(step: int, name: str) -> Tensor:
    return torch.stack([gradients(step, rank)[name] for rank in range(SIZE)]).mean(0)


def test_all_ranks_get_the_same_and_what_is_left_out_comes_later(ranks: Ranks) -> None:
    strategies = [strategy_of() for _ in range(SIZE)]
    found = ranks(lambda rank: reduced(strategies[rank], rank, steps=30))
    for name in ("matrix", "kernel"):
        for step in range(30):
            assert all(torch.equal(found[0][step][name], each[step][name]) for each in found)
            assert torch.linalg.matrix_rank(found[0][step][name].flatten(1), atol=1e-4) <= 2
        sent = torch.stack([each[name] for each in found[0]]).sum(0)
        wanted = torch.stack([mean(step, name) for step in range(30)]).sum(0)
        left_out = torch.stack([each.state_dict()["left_out"][name] for each in strategies]).mean(0)
        assert torch.allclose(sent.flatten(1) + left_out, wanted.flatten(1), atol=1e-4)
    for name in ("small", "bias"):  # of which a product would be no smaller
        assert all(torch.allclose(found[0][step][name], mean(step, name), atol=1e-6) for step in range(30))


@pytest.mark.parametrize(("from_step", "numbers"), [(0, 2 * (12 + 10) + 2 * (8 + 27) + 6 + 12), (1, 120 + 216 + 6 + 12)])
def test_as_much_travels_as_is_said(ranks: Ranks, from_step: int, numbers: int) -> None:
    ranks(lambda rank: reduced(strategy_of(from_step=from_step), rank, steps=1))
    assert ranks.numbers() == numbers  # type: ignore[attr-defined]


def test_a_mean_of_that_rank_arrives_whole(ranks: Ranks) -> None:
    def act(rank: int) -> Tensor:
        strategy, net = strategy_of(), Net()
        thin = torch.arange(24.0).view(12, 2).sin() @ torch.arange(20.0).view(2, 10).cos()
        for step in range(3):
            put(net, {"matrix": thin * (rank + 1)})
            strategy.reduce_gradients(net, step)
        assert net.matrix.grad is not None
        return net.matrix.grad - 2 * thin

    assert all(torch.allclose(each, torch.zeros(()), atol=1e-4) for each in ranks(act))


def test_before_its_first_step_whole_gradients_travel(ranks: Ranks) -> None:
    def act(rank: int) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        strategy = strategy_of(from_step=3)
        return reduced(strategy, rank, steps=3), strategy.state_dict()

    for found, state in ranks(act):
        assert all(torch.allclose(value, mean(step, name), atol=1e-6) for step, each in enumerate(found) for name, value in each.items())
        assert state == {"left_out": {}, "bases": {}}


def test_it_goes_on_from_what_was_saved_to_the_bit(ranks: Ranks) -> None:
    def act(rank: int) -> list[bool]:
        whole, first, second = strategy_of(), strategy_of(), strategy_of()
        expected = reduced(whole, rank, steps=6)[3:]
        reduced(first, rank, steps=3)
        second.start_training(Net(), first.state_dict(), weights_are_equal=True)
        found = reduced(second, rank, steps=3, first=3)
        return [torch.equal(mine[name], theirs[name]) for mine, theirs in zip(found, expected, strict=True) for name in mine]

    assert all(map(all, ranks(act)))


def test_a_gradient_that_is_not_finite_spoils_its_own_step_alone(ranks: Ranks) -> None:
    def act(rank: int) -> tuple[Tensor, dict[str, Any]]:
        strategy, net = strategy_of(), Net()
        reduced(strategy, rank, steps=2)
        before = {name: dict(kept) for name, kept in strategy.state_dict().items()}
        put(net, gradients(2, rank))
        assert net.matrix.grad is not None
        if rank == 1:
            net.matrix.grad[3, 3] = torch.inf
        strategy.reduce_gradients(net, 2)
        after = strategy.state_dict()
        assert all(torch.equal(after[kind]["matrix"], before[kind]["matrix"]) for kind in before)
        assert not torch.equal(after["left_out"]["kernel"], before["left_out"]["kernel"])
        return net.matrix.grad, reduced(strategy, rank, steps=1, first=3)[0]

    for spoiled, next_one in ranks(act):
        assert not torch.isfinite(spoiled).all()  # which every rank sees in the norm
        assert all(torch.isfinite(each).all() for each in next_one.values())


def test_what_it_keeps_is_counted() -> None:
    strategy = strategy_of()
    assert strategy.rank_memory(Net(), 1).exchange_bytes == 0
    assert strategy.rank_memory(Net(), 3).exchange_bytes == 4 * (120 + 2 * 10 + 216 + 2 * 27)


@pytest.mark.parametrize("columns", [1, 3])
def test_one_rank_has_its_own_gradient(columns: int) -> None:
    strategy, net = PowerSGD(rank=columns, from_step=0), Net()
    put(net, gradients(0, 0))
    strategy.reduce_gradients(net, 0)
    for name, value in gradients(0, 0).items():
        gradient = net.get_parameter(name).grad
        assert gradient is not None and torch.equal(gradient, value)
