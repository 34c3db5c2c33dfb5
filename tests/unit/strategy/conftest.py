"""The collectives that strategies use, between threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, local
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_train.strategy import means
from tests.unit.training.threads import on_all

SIZE = 3


class ThreadDist:
    """`torch.distributed` of one thread for each rank."""

    def __init__(self, size: int) -> None:
        self.size, self.here, self.slots = size, Barrier(size, timeout=20), [torch.empty(0)] * size
        self.own, self.calls, self.numbers = local(), 0, 0

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.size

    def all_reduce(self, tensor: Tensor) -> None:
        self.calls += 1
        if self.own.rank == 0:
            self.numbers += tensor.numel()
        tensor.copy_(torch.stack(self._all(tensor)).sum(0))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self.calls += 1
        tensor.copy_(self._all(tensor)[src])

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self.slots[self.own.rank] = tensor.clone()
        self.here.wait()
        found = list(self.slots)
        self.here.wait()
        return found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Runs a function on each rank, and returns what they return."""
    fake = ThreadDist(SIZE)
    monkeypatch.setattr(means, "dist", fake)

    def run(act: Callable[[int], Any]) -> list[Any]:
        def as_rank(rank: int) -> Any:
            fake.own.rank = rank
            return act(rank)

        return on_all(SIZE, as_rank)

    run.calls = lambda: fake.calls  # type: ignore[attr-defined]
    run.numbers = lambda: fake.numbers  # type: ignore[attr-defined]  # of a rank, added up with the others'
    return run
