"""Several ranks in one process, for what only their savers do: they talk through a real store, and write in real threads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore

from ddp_train.checkpoint.save import Saver
from ddp_train.checkpoint.schedule import Retention, remove_old
from ddp_train.distributed.world import World
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.parts import LOSS


class _Rank(World):
    """Talks through the store alone. Ranks that take turns in one thread must let the one that gives come first."""

    def copy_from(self, rank: int, tensor: Tensor) -> None:
        values = tensor.view(-1).view(torch.uint8).numpy()
        values[:] = np.frombuffer(self._told_by(rank, values.tobytes()), np.uint8)

    def gather(self, value: Any) -> list[Any]:
        return [pickle.loads(self._told_by(rank, pickle.dumps(value))) for rank in range(self.size)]

    def _told_by(self, rank: int, message: bytes) -> bytes:
        assert self.store is not None
        number = self.store.add(f"heard/{self.rank}", 1)
        if rank == self.rank:
            self.store.set(f"told/{number}", message)
        return bytes(self.store.get(f"told/{number}"))

    def from_main(self, make: Callable[[], Any]) -> Any:
        return pickle.loads(self._told_by(0, pickle.dumps(make() if self.is_main else None)))


def worlds(size: int) -> list[World]:
    """Return the worlds of so many ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    device = torch.device("cpu")
    return [
        _Rank(rank=rank, size=size, local_rank=rank, local_size=size, device=device, store=store.clone() if rank else store)
        for rank in range(size)
    ]


class Ranks:
    """The savers of all ranks, which have the same model and optimizer, as after an all-reduce, or each its own."""

    def __init__(self, folder: Path, parts: Components | Sequence[Components], *, size: int = 3, keep_last: int = 2) -> None:
        self.folder, self.parts = folder, [parts] * size if isinstance(parts, Components) else parts
        self.worlds = worlds(size)
        self.savers = [
            Saver(
                folder=folder,
                world=world,
                config_hash="abc",
                remove_old=lambda path: remove_old(path, Retention(last=keep_last, ranking=LOSS)),
            )
            for world in self.worlds
        ]

    def start(self, step: int, **settings: Any) -> None:
        """Begin to save on every rank."""
        state = TrainState(step=step, position=step * 32)
        for rank, (saver, world) in enumerate(zip(self.savers, self.worlds, strict=True)):
            saver.save(
                checkpoint_content(self.parts[rank], state, WindowSums([float(rank)], [2.0], skipped_samples=rank), world), **settings
            )

    def save(self, step: int) -> str | None:
        """Save on every rank and return what went wrong; all ranks must say the same."""
        self.start(step)
        return self.finish()

    def finish(self) -> str | None:
        problems = {saver.finish() for saver in self.savers}
        assert len(problems) == 1, problems
        return problems.pop()
