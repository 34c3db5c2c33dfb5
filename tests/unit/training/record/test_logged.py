"""Named groups of numbers: summed at once, and given back by name."""

import pytest
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


def test_each_group_comes_back_under_its_name_whatever_was_added_between() -> None:
    world = Doubling()
    reduction = Reduction(world)
    reduction.add("flags", [True, False])
    reduction.add_tensors("losses", [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4)])
    reduction.add("none", [])
    reduction.add_tensors("mixed", [torch.tensor(0.5), 0.25])
    reduction.add("memory", [7])
    assert reduction.sum() == {"flags": [2, 0], "none": [], "memory": [14], "losses": [2, 4, 6, 8], "mixed": [1, 0.5]}
    assert len(world.reduced) == 1


@pytest.mark.parametrize("first", ["add", "add_tensors"])
def test_a_name_is_given_once(first: str) -> None:
    reduction = Reduction(alone())
    getattr(reduction, first)("mine", [1.0])
    for add in (reduction.add, reduction.add_tensors):
        with pytest.raises(AssertionError):
            add("mine", [1.0])
