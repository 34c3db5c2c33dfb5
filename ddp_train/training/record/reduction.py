"""Sums over the ranks: numbers of several origins in one reduction, each group of them under its name."""

from collections.abc import Iterable
from itertools import chain, islice

import torch
from torch import Tensor

from ddp_train.distributed.world import World


class Reduction:
    """Named groups of this rank's numbers, to be summed together. Every rank adds the same groups in the same order, as long as its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._numbers: dict[str, list[float]] = {}
        self._tensors: dict[str, list[Tensor]] = {}

    def add(self, name: str, numbers: Iterable[float]) -> None:
        """Add a group of the host's numbers, which go to the device together."""
        assert name not in self._numbers and name not in self._tensors
        self._numbers[name] = [*numbers]

    def add_tensors(self, name: str, tensors: Iterable[float | Tensor]) -> None:
        """Add a group of numbers that are on the device; others among them are sent there, one by one."""
        assert name not in self._numbers and name not in self._tensors
        sent = (torch.as_tensor(tensor, dtype=torch.float64).to(self.world.device, non_blocking=True) for tensor in tensors)
        self._tensors[name] = [tensor.flatten() for tensor in sent]

    def sum(self) -> dict[str, list[float]]:
        """Return the sums of each group over all ranks: one reduction, one read of the device. Collective."""
        numbers = torch.tensor([*chain.from_iterable(self._numbers.values())], dtype=torch.float64)
        sent = numbers.to(self.world.device, non_blocking=True)
        sums = iter(self.world.sum(torch.cat([sent, *chain.from_iterable(self._tensors.values())])).tolist())
        lengths = {name: len(group) for name, group in self._numbers.items()}
        lengths |= {name: sum(map(len, group)) for name, group in self._tensors.items()}
        return {name: [*islice(sums, length)] for name, length in lengths.items()}
