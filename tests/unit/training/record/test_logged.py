"""Groups of numbers: summed at once, and each gets its own sums back."""

import torch
from torch import Tensor

from ddp_train.distributed.world import World, alone
from ddp_train.training.record.logged import Reduction


class Doubling(World):
    """Two ranks with the same numbers."""

    def __init__(self) -> None:
        vars(self).update(vars(alone()))
        self.reduced: list[Tensor] = []

    def sum(self, values: Tensor) -> Tensor:
        self.reduced.append(values)
        return values * 2


def test_each_group_gets_its_own_sums_whatever_was_added_between() -> None:
    world = Doubling()
    reduction = Reduction(world)
    flags = reduction.add([True, False])
    losses = reduction.add_tensors([torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4)])
    none, none_on_device = reduction.add([]), reduction.add_tensors([])
    mixed = reduction.add_tensors([torch.tensor(0.5), 0.25])
    memory = reduction.add([7])
    reduction.sum()
    assert flags.sums == [2, 0] and losses.sums == [2, 4, 6, 8] and mixed.sums == [1, 0.5] and memory.sums == [14]
    assert none.sums == none_on_device.sums == [] and len(world.reduced) == 1
