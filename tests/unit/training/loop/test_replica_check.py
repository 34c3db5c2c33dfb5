"""Which rank's copy of the model differs, and in which tensor; here of ranks that are threads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from ddp_train.strategy.ddp import DDP
from ddp_train.training.loop.replica_check import ReplicaCheck, ReplicaError
from tests.unit.parts import components, trainer
from tests.unit.training.threads import ThreadWorld, on_all, thread_worlds


@dataclass
class Fleet:
    """Ranks whose models are copies, of which some are changed."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    every_steps: int = 1
    changes: dict[int, dict[str, str]] = field(default_factory=dict)  # of what a rank says of its other parts
    checks: list[ReplicaCheck] = field(default_factory=list)

    def __post_init__(self) -> None:
        worlds = thread_worlds(len(self.models))
        self.checks = on_all(len(worlds), lambda rank: self._check_of(rank, worlds[rank]))

    def after_step(self, step: int) -> None:
        self._on_all(lambda rank: self.checks[rank].after_step(step))

    def before_save(self, step: int) -> None:
        self._on_all(lambda rank: self.checks[rank].before_save(step))

    def _on_all(self, act: Callable[[int], None]) -> None:
        """Compare on all ranks, which must come to the same."""

        def found(rank: int) -> str:
            try:
                act(rank)
            except ReplicaError as error:
                return error.happened
            return ""

        first, *others = on_all(len(self.checks), found)
        assert set(others) == {first}
        if first:
            raise ReplicaError(happened=first)

    def _check_of(self, rank: int, world: ThreadWorld) -> ReplicaCheck:
        others = lambda: {"scheduler": "a", "scaler": "b", **self.changes.get(rank, {})}  # noqa: E731
        model, optimizer = self.models[rank], self.optimizers[rank]
        return ReplicaCheck(model=model, world=world, every_steps=self.every_steps, optimizer=optimizer, others=others, strategy=DDP())


def fleet(size: int, *, every_steps: int = 1) -> Fleet:
    models = []
    for _ in range(size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 2, dtype=torch.bfloat16))
        model.register_buffer("table", torch.ones(3, dtype=torch.bool))
        models.append(model)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return Fleet(models, optimizers, every_steps)


class _Mesh:
    """As a mesh of replicas and shards says it."""

    ndim = 2

    def __init__(self, replicas: int, shards: int) -> None:
        self._sizes = (replicas, shards)

    def size(self, dim: int | None = None) -> int:
        return math.prod(self._sizes) if dim is None else self._sizes[dim]


def cut_fleet(replicas: int, shards: int) -> Fleet:
    """Return ranks of which each has rows of its own, but for its replicas."""
    found = fleet(replicas * shards)
    for rank, (model, optimizer) in enumerate(zip(found.models, found.optimizers, strict=True)):
        for tensor in [*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())]:
            tensor.data += rank % shards
            cut: Any = tensor
            cut.device_mesh, cut.placements, cut.to_local = _Mesh(replicas, shards), (Replicate(), Shard(0)), tensor.detach
    found.checks = on_all(len(found.models), lambda rank: found._check_of(rank, found.checks[rank].world))  # type: ignore[arg-type]
    return found


def flip_a_bit(tensor: Tensor, place: int, bit: int) -> None:
    tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten()[place] ^= 1 << bit


def test_the_loop_tells_it_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(ReplicaCheck, "after_step", lambda check, step: steps.append(step))
    trainer(components("trainer.max_steps=3"), check_replicas_every_steps=1).train()
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(("name", "place", "bit"), [("0.weight", 1199, 0), ("2.bias", 1, 14), ("table", 0, 0)])
def test_one_bit_on_one_rank_is_found_and_named(name: str, place: int, bit: int) -> None:
    world = check = fleet(4, every_steps=5)
    check.after_step(5)
    flip_a_bit(world.models[2].get_parameter(name) if name != "table" else world.models[2].get_buffer(name), place, bit)
    check.after_step(6)
    with pytest.raises(ReplicaError, match=rf"after step 10: rank 2 on \S+ differs from the others in {re.escape(name)}$"):
        check.after_step(10)
    with pytest.raises(ReplicaError):
        check.before_save(7)


def test_a_bit_of_the_optimizer_is_found_before_it_has_moved_a_weight() -> None:
    world = check = fleet(3)
    check.after_step(1)
    flip_a_bit(world.optimizers[1].state[world.models[1].get_parameter("0.bias")]["exp_avg_sq"], 7, 2)
    with pytest.raises(ReplicaError, match=r"rank 1 on \S+ differs from the others in exp_avg_sq of 0\.bias"):
        check.after_step(2)


def test_a_schedule_and_tensors_that_one_rank_alone_has_are_named() -> None:
    world = check = fleet(3)
    world.changes[2] = {"scheduler": "c"}
    with pytest.raises(ReplicaError, match=r"rank 2 on \S+ differs from the others in scheduler"):
        check.after_step(1)
    world.changes[2] = {"optimizer's tensors": "of another kind"}
    with pytest.raises(ReplicaError, match=r"rank 2 on \S+ differs from the others in optimizer's tensors"):
        check.after_step(2)


def test_two_ranks_differ_and_nobody_knows_which_is_right() -> None:
    world = check = fleet(2)
    flip_a_bit(world.models[1].get_parameter("0.bias"), 0, 3)
    with pytest.raises(ReplicaError, match=r"the ranks differ in 0\.bias, and no majority"):
        check.after_step(1)


def test_of_shards_the_replicas_are_compared() -> None:
    world = check = cut_fleet(3, 2)
    check.after_step(1)  # shards differ from each other
    flip_a_bit(world.models[3].get_parameter("0.weight"), 5, 1)
    with pytest.raises(ReplicaError, match=r"rank 3 on \S+ differs from the others in 0\.weight \(shard 1 of 2\)$"):
        check.after_step(2)
    flip_a_bit(world.models[3].get_parameter("0.weight"), 5, 1)
    flip_a_bit(world.optimizers[0].state[world.models[0].get_parameter("0.bias")]["exp_avg"], 5, 1)
    with pytest.raises(ReplicaError, match=r"rank 0 on \S+ differs from the others in exp_avg of 0\.bias \(shard 0 of 2\)$"):
        check.after_step(3)


def test_rows_that_one_rank_alone_has_are_compared_with_nothing() -> None:
    world = check = cut_fleet(1, 3)
    flip_a_bit(world.models[1].get_parameter("0.weight"), 5, 1)
    check.after_step(1)


def test_averages_that_each_rank_has_of_its_own_are_left_out() -> None:
    world = check = fleet(3)
    for rank, model in enumerate(world.models):
        model[1](torch.full((2, 300), float(rank)))
    check.after_step(1)


def test_ranks_that_step_apart_are_compared_when_they_have_met_with_what_that_needs() -> None:
    class Apart:
        weights_are_per_rank, weights_are_equal = True, False

        def __init__(self, value: float) -> None:
            self.value = value

        def state_dict(self) -> dict[str, dict[str, Tensor]]:
            return {"last": {"weight": torch.full((2,), self.value)}}

    ranks = fleet(3, every_steps=4)
    own = [Apart(1.0), Apart(1.0), Apart(2.0)]
    for check, strategy in zip(ranks.checks, own, strict=True):
        check.strategy = strategy  # type: ignore[assignment]
    for step in (1, 4, 5):  # due at the fourth
        ranks.after_step(step)
    ranks.before_save(5)
    for strategy in own:
        strategy.weights_are_equal = True
    with pytest.raises(ReplicaError, match=r"after step 6: rank 2 on .* differs from the others in last of weight"):
        ranks.after_step(6)
    own[2].value = 1.0
    ranks.before_save(6)  # has been done
    ranks.after_step(7)  # is not due
    own[2].value = 2.0
    ranks.after_step(7)
    with pytest.raises(ReplicaError, match="found after step 8"):
        ranks.after_step(8)
