"""Ranks that are threads of this process, with collectives of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_train.distributed.world import World

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(World):
    """One of several ranks; each collective waits for all of them."""

    all_here: Barrier
    slots: list[Any]

    def gather(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.all_here.wait()
        found = list(self.slots)
        self.all_here.wait()
        return found

    def gather_rows(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values.clone()))

    def sum(self, values: Tensor) -> Tensor:
        return values.copy_(self.gather_rows(values).sum(0))

    def lowest(self, values: Tensor) -> Tensor:
        return values.copy_(self.gather_rows(values).amin(0))


def thread_worlds(size: int) -> list[ThreadWorld]:
    here, slots = Barrier(size, timeout=20), [None] * size
    device = torch.device("cpu")
    return [
        ThreadWorld(rank=rank, size=size, local_rank=rank, local_size=size, device=device, all_here=here, slots=slots)
        for rank in range(size)
    ]


def on_all(size: int, act: Callable[[int], Value]) -> list[Value]:
    """Do something as every rank at once; an error of the first that has one is raised."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, range(size)))
