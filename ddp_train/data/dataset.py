"""Use any `torch.utils.data.Dataset` as a data source."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from ddp_train.data.order import mix
from ddp_train.interfaces import Batch, DataSource, Indices


class DatasetSource:
    """A map-style dataset, read a batch at a time: by `__getitems__` where it has that, else item by item.

    Facts are the dataset's own `facts`, if any, and `num_classes` where it has `classes`.
    Transforms inside the dataset may draw from the global generators of python, numpy and torch: these are seeded for each sample, so that
    it looks the same whatever the number of ranks, workers or restarts, and the process's own streams go on as if nothing had been drawn.
    Generators of a dataset's own are out of our reach.

    Raises:
        TypeError: the dataset has no length or no positions.
    """

    def __init__(self, dataset: Any) -> None:
        name = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            raise TypeError(f"{name} is an IterableDataset: samples are read by position here; use a map-style dataset")
        for method, what in {"__len__": "how many samples there are", "__getitem__": "the sample at a position"}.items():
            if not hasattr(type(dataset), method):
                raise TypeError(f"{name} has no {method}: a dataset must tell {what}")
        self.dataset = dataset
        self._draws = False  # whether a read has ever drawn; it is found out by itself in each process
        self.keys_of: Callable[[Indices], NDArray[np.uint64]] = _always_the_same
        """What the generators are seeded with for each sample, as in `Augmenting`: in training it depends on the epoch."""

    @property
    def facts(self) -> Mapping[str, Any]:
        facts = dict(getattr(self.dataset, "facts", {}))
        if hasattr(self.dataset, "classes"):
            facts.setdefault("num_classes", len(self.dataset.classes))
        return facts

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, collated as torch's DataLoader does by default."""
        positions, before, have_moved = indices.tolist(), _streams(), True
        try:
            if not self._draws:
                samples = self._read(positions)
                self._draws = have_moved = not _are_same(before, _streams())
            if self._draws:
                samples = []
                for position, key in zip(positions, self.keys_of(indices).tolist(), strict=True):
                    _seed(key)
                    samples += self._read([position])
        finally:
            if have_moved:
                _put_back(before)
        return default_collate(samples)

    def _read(self, positions: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(positions))
        return [self.dataset[position] for position in positions]


def as_source(candidate: Any) -> DataSource:
    """Return `candidate` when it is a data source already, else a `DatasetSource` of it."""
    return candidate if isinstance(candidate, DataSource) else DatasetSource(candidate)


def _always_the_same(indices: Indices) -> NDArray[np.uint64]:
    return mix(indices.astype(np.uint64))


_Streams = tuple[Any, Any, torch.Tensor]
"""The states of the global generators of python, numpy and torch (on the CPU)."""


def _streams() -> _Streams:
    return random.getstate(), np.random.get_state(legacy=True), torch.default_generator.get_state()


def _are_same(left: _Streams, right: _Streams) -> bool:
    _, left_keys, *left_rest = left[1]
    _, right_keys, *right_rest = right[1]
    return left[0] == right[0] and left_rest == right_rest and np.array_equal(left_keys, right_keys) and torch.equal(left[2], right[2])


def _put_back(streams: _Streams) -> None:
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    torch.default_generator.set_state(streams[2])


def _seed(key: int) -> None:
    """Seed the global generators with 64 bits. numpy and torch take halves: with the same 32 bits both would give the same stream."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 32)  # torch.manual_seed would also seed the GPUs, which have the model's dropout
