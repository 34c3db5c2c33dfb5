"""A data set of numbers, of which some cannot be read."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.interfaces import DataSource, Indices
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.reader import MicroBatch
from ddp_train.loader.sampler import Shuffled


class Numbers(DataSource):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self._length = length

    @property
    def facts(self) -> Mapping[str, Any]:
        return {}

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices.copy())


class Damaged(Numbers):
    """Numbers, of which some cannot be read, or end the process that reads them."""

    def __init__(self, length: int, *, bad: Sequence[int] = (), deadly: Sequence[int] = ()) -> None:
        super().__init__(length)
        self._bad, self._deadly = bad, deadly

    def where(self, index: int) -> str:
        return f"file_{index}.txt"

    def batch(self, indices: Indices) -> Tensor:
        if np.isin(indices, self._deadly).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if np.isin(indices, self._bad).any():
            raise ValueError("this is no number")
        return super().batch(indices)


def read(
    source: Numbers, *, workers: int, skips_bad_samples: bool = False, world_size: int = 1, parts: int = 1, epochs: int = 1
) -> list[MicroBatch]:
    """Return the micro-batches of all ranks, of whole epochs."""
    found = []
    for rank in range(world_size):
        order = SampleOrder(Shuffled(len(source), seed=0), global_batch_size=8, drop_last=False)
        loader = PositionedTrainLoader(
            source,
            order,
            rank=rank,
            world_size=world_size,
            grad_accum_steps=parts,
            num_workers=workers,
            pin_memory=False,
            skips_bad_samples=skips_bad_samples,
        )
        found += list(islice(loader.micro_batches(0), order.steps_per_epoch * epochs * parts))
    return found
