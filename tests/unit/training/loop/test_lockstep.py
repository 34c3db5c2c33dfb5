"""As many batches on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.loop.lockstep import agreed, in_step


@dataclass(frozen=True, kw_only=True)
class Heard(World):
    """Adds to each value what the other ranks say then."""

    others: list[int] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        assert values.device.type == "cpu", "the host would wait for the device"
        return values + self.others.pop(0)


def world(*others: int) -> World:
    return Heard(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("meta"), others=list(others))


def test_a_rank_that_is_through_goes_on_with_its_last_batch_which_does_not_count() -> None:
    batches = [MicroBatch(torch.tensor([1.0]), True), MicroBatch(torch.tensor([2.0]), True)]
    found = list(in_step(iter(batches), world(1, 1, 1, 1, 0)))
    assert [float(each.batch) for each in found] == [1, 2, 2, 2]
    assert [each.counts for each in found] == [True, True, False, False]


def test_a_rank_with_more_goes_on_when_the_others_are_through() -> None:
    batches = [MicroBatch(torch.tensor([float(number)]), True) for number in range(3)]
    assert list(in_step(iter(batches), world(1, 0, 0, 0))) == batches


def test_all_stop_when_one_is_asked_to() -> None:
    is_asked = agreed(lambda: False, world(0, 1))
    assert [is_asked(), is_asked()] == [False, True]
