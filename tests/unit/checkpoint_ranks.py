"""Several ranks in one process, for what only their savers do: they talk through a real store, and write in real threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore

from ddp_train import checkpoint
from ddp_train.build import Components
from ddp_train.checkpoint_policy import Keep
from ddp_train.distributed import World
from ddp_train.state import TrainState, WindowSums
from tests.unit.parts import LOSS


class _Rank(World):
    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Take rank 0's tensors, when it has come here first."""
        assert self.store is not None
        number = self.store.add(f"copies/{self.rank}", 1)
        for place, tensor in enumerate(tensors):
            if self.is_main:
                self.store.set(f"copy/{number}/{place}", tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(self.store.get(f"copy/{number}/{place}"), np.uint8)

    def from_main(self, value: Any) -> Any:
        """Take what rank 0 has said first."""
        assert self.store is not None
        if self.is_main:
            self.store.set("from_main", str(value))
        return self.store.get("from_main").decode()


def worlds(size: int) -> list[World]:
    """Return the worlds of so many ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    device = torch.device("cpu")
    return [_Rank(rank=rank, size=size, local_rank=rank, local_size=size, device=device, store=store) for rank in range(size)]


class Ranks:
    """The savers of all ranks, which have the same model and optimizer, as after an all-reduce, or each its own."""

    def __init__(self, folder: Path, parts: Components | Sequence[Components], *, size: int = 3, keep_last: int = 2) -> None:
        self.folder, self.parts = folder, [parts] * size if isinstance(parts, Components) else parts
        self.savers = [
            checkpoint.Saver(
                folder, world, config_hash="abc", remove_old=lambda path: checkpoint.remove_old(path, Keep(last=keep_last, ranking=LOSS))
            )
            for world in worlds(size)
        ]

    def start(self, step: int, **settings: Any) -> None:
        """Begin to save on every rank."""
        state = TrainState(step=step, samples=step * 32)
        for rank, saver in enumerate(self.savers):
            saver.save(self.parts[rank], state, WindowSums([float(rank)], [2.0], skipped=rank), **settings)

    def save(self, step: int) -> str:
        """Save on every rank and return what went wrong; all ranks must say the same."""
        self.start(step)
        return self.finish()

    def finish(self) -> str:
        problems = {saver.finish() for saver in self.savers}
        assert len(problems) == 1, problems
        return problems.pop()
