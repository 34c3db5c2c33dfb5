"""What a synchronisation does to the ranks' weights; here the ranks are threads. Between processes: tests/distributed/test_local_sgd.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces.strategy import memory_key
from ddp_train.strategy.local_sgd import LocalSGD
from tests.unit.strategy.conftest import SIZE

MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
        self.rough = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.tensor([0.1, 0.7]), requires_grad=False)
        self.register_buffer("mean", torch.tensor([0.1, 0.3]))
        self.register_buffer("count", torch.tensor(0))


def moved(net: Net, rank: int, by: float = 1.0) -> None:
    """Take what stands for the steps of a rank."""
    with torch.no_grad():
        net.weight += by * torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)
        net.rough += by * rank
        net.mean += by * (rank + 1)  # type: ignore[operator]
        net.count += 5 + rank  # type: ignore[operator]


def make(**settings: Any) -> tuple[Net, LocalSGD]:
    net, strategy = Net(), LocalSGD(**(MEAN | settings))
    strategy.prepare(net, torch.device("cpu"), SIZE)
    strategy.start_training(net, {}, weights_are_equal=True)
    return net, strategy


def test_the_weights_are_put_together_after_every_so_many_steps_and_nothing_travels_between(ranks: Any) -> None:
    nets = ranks(lambda rank: make(every_steps=3))
    before = ranks.calls()

    def steps(rank: int) -> list[bool]:
        net, strategy = nets[rank]
        alike = []
        for step in (1, 2):
            moved(net, rank)
            strategy.after_step(step)
            alike.append(strategy.weights_are_equal)
        return alike

    assert ranks(steps) == [[False, False]] * SIZE
    assert ranks.calls() == before
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)

    def third(rank: int) -> bool:
        moved(nets[rank][0], rank)
        nets[rank][1].after_step(3)
        return bool(nets[rank][1].weights_are_equal)

    assert ranks(third) == [True] * SIZE
    for net, _ in nets:
        torch.testing.assert_close(net.weight, torch.tensor([0.1, 0.2, 0.3]) + 3 * 2 * torch.tensor([1.0, 2.0, 4.0]))
        torch.testing.assert_close(net.mean, torch.tensor([0.1, 0.3]) + 6)
        assert net.rough.tolist() == [4.0, 5.0]
        assert torch.equal(net.frozen, torch.tensor([0.1, 0.7]))  # a mean of three would have rounded it
        assert net.count.item() == 15
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(net.state_dict().values(), nets[0][0].state_dict().values(), strict=True)
        )


def test_the_outer_optimizer_is_sgd_with_nesterovs_momentum(ranks: Any) -> None:
    nets = ranks(lambda rank: make(every_steps=1, outer_lr=0.7, outer_momentum=0.9))
    expected = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
    outer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for step in (1, 2, 3):
        way = 2 * step * torch.tensor([1.0, 2.0, 4.0])

        def act(rank: int, step: int = step) -> None:
            moved(nets[rank][0], rank, by=step)
            nets[rank][1].after_step(step)

        ranks(act)
        expected.grad = -way
        outer.step()
        for net, _ in nets:
            torch.testing.assert_close(net.weight, expected)
            assert torch.equal(net.frozen, torch.tensor([0.1, 0.7]))
    torch.testing.assert_close(nets[0][0].mean, torch.tensor([0.1, 0.3]) + 12)  # buffers take the mean alone


def test_what_is_evaluated_is_the_mean_and_afterwards_each_rank_has_its_own_again(ranks: Any) -> None:
    nets = ranks(lambda rank: make(every_steps=10))

    def act(rank: int) -> tuple[bool, bool, bool]:
        net, strategy = nets[rank]
        average = torch.full((2,), float(rank))
        moved(net, rank)
        strategy.after_step(1)
        own = {name: value.clone() for name, value in net.state_dict().items()}
        with strategy.mean_over_ranks(net, [average]) as kept, strategy.mean_over_ranks(net, [average]) as again:
            is_mean = torch.allclose(net.weight, torch.tensor([2.1, 4.2, 8.3])) and average.tolist() == [1.0, 1.0] and again == {}
            is_kept = all(torch.equal(kept[memory_key(value)], own[name]) for name, value in net.state_dict().items())
        is_back = all(torch.equal(value, own[name]) for name, value in net.state_dict().items()) and average.tolist() == [rank, rank]
        return is_mean, is_kept, is_back

    assert ranks(act) == [(True, True, True)] * SIZE


def test_it_goes_on_from_its_state_as_if_nothing_had_been(ranks: Any) -> None:
    settings = {"every_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.5}
    nets = ranks(lambda rank: make(**settings))

    def steps(rank: int, net: Net, strategy: LocalSGD, numbers: range) -> Net:
        for step in numbers:
            moved(net, rank, by=0.1 * step)
            strategy.after_step(step)
        return net

    def act(rank: int) -> bool:
        net, strategy = nets[rank]
        steps(rank, net, strategy, range(1, 4))
        again, other = Net(), LocalSGD(**settings)  # type: ignore[arg-type]
        other.prepare(again, torch.device("cpu"), SIZE)
        again.load_state_dict(net.state_dict())
        state = {kind: {name: each.clone() for name, each in part.items()} for kind, part in strategy.state_dict().items()}
        other.start_training(again, state, weights_are_equal=False)
        assert not other.weights_are_equal
        first, second = (steps(rank, *each, range(4, 9)).state_dict() for each in ((net, strategy), (again, other)))
        return all(torch.equal(value, second[name]) for name, value in first.items())

    assert ranks(act) == [True] * SIZE


def test_weights_that_each_rank_has_are_not_given_away_when_others_are_trained(ranks: Any) -> None:
    nets = ranks(lambda rank: make())

    def act(rank: int) -> float:
        net, strategy = nets[rank]
        moved(net, rank)
        net.frozen.requires_grad_(True)
        strategy.prepare(net, torch.device("cpu"), SIZE)  # as a callback that thaws parts lets it be
        return float(net.weight.detach()[0])

    assert len(set(ranks(act))) == SIZE


def test_one_rank_alone_trains_the_plain_model_unless_there_is_an_outer_optimizer() -> None:
    for settings, way in (({}, 1.0), ({"outer_lr": 0.5}, 0.5)):
        net, strategy = Net(), LocalSGD(every_steps=1, **(MEAN | settings))
        strategy.prepare(net, torch.device("cpu"), 1)
        strategy.start_training(net, {}, weights_are_equal=True)
        assert bool(strategy.state_dict()["last"]) == bool(settings)
        with torch.no_grad():
            net.weight += torch.tensor([1.0, 0.0, 0.0])
        strategy.after_step(1)
        assert strategy.weights_are_equal
        assert net.weight[0].item() == pytest.approx(0.1 + way)


def test_an_optimizer_with_other_weights_to_evaluate_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    with pytest.raises(ConfigError, match="would differ between the ranks"):
        LocalSGD().setup_optimizer(ScheduleFree(Net().parameters(), lr=0.1))
