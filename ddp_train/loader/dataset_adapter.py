"""Use any `torch.utils.data.Dataset` as a data source."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from ddp_train.data.hashing import mix
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, DataSource, Indices
from ddp_train.loader.stream_shard import comes_from

Collate = Callable[[list[Any]], Batch]
"""Makes a batch of samples, as the DataLoader's `collate_fn`."""


class DatasetSource:
    """A map-style dataset, read a batch at a time: by `__getitems__` where it has that, else item by item.

    Facts are the dataset's own `facts`, if any, and `num_classes` where it has `classes`.
    Transforms inside the dataset may draw from the global generators of python, numpy and torch: these are seeded for each sample, so that
    it looks the same whatever the number of ranks, workers or restarts, and the process's own streams go on as if nothing had been drawn.
    Generators of a dataset's own are out of our reach. A Hugging Face dataset without a format gives tensors.

    Args:
        fields: the keys of a sample that make the batch, in this order; None: all of the sample.
        by: what makes the batch of the samples; None: torch's default. It may draw, too: as its samples say.

    Raises:
        TypeError: the dataset has no length or no positions.
    """

    def __init__(self, dataset: Any, fields: Sequence[str] | None = None, by: Collate | None = None) -> None:
        name = type(dataset).__name__
        if isinstance(dataset, Mapping):
            raise TypeError(
                f"{name} has several splits ({', '.join(map(str, dataset))}): choose one, as data.split={next(iter(dataset), '')}"
            )
        for method, what in {"__len__": "how many samples there are", "__getitem__": "the sample at a position"}.items():
            if not hasattr(type(dataset), method):
                raise TypeError(f"{name} has no {method}: a dataset must tell {what}")
        has_no_format = comes_from(dataset, "datasets") and dataset.format["type"] is None
        # As tensors: torch's way of stacking turns lists of numbers, which Hugging Face gives else, on their side.
        self.dataset = dataset.with_format("torch") if has_no_format else dataset
        self._fields, self._by = fields, by
        self._draws = False  # whether a read has ever drawn; it is found out by itself in each process
        self.keys_of: Callable[[Indices], NDArray[np.uint64]] = _always_the_same
        """What the generators are seeded with for each sample, as in `Augmenting`: in training it depends on the epoch."""

    @property
    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, collated."""
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
        if self._by is None:
            return collate(samples, self._fields)
        with seeded(int(np.add.reduce(self.keys_of(indices)))):
            return collate(samples, self._fields, self._by)

    def _read(self, positions: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(positions))
        return [self.dataset[position] for position in positions]


def as_source(candidate: Any, fields: Sequence[str] | None = None, by: Collate | None = None) -> DataSource:
    """Return `candidate` when it is a data source already, else a `DatasetSource` of it."""
    if not isinstance(candidate, DataSource):
        return DatasetSource(candidate, fields, by)
    for key, given in {"loader.fields": fields, "loader.collate": by}.items():
        if given is not None:
            raise ConfigError(key=key, happened=f"is given, and {type(candidate).__name__} gives whole batches", expected="null")
    return candidate


def facts_of(dataset: Any) -> Mapping[str, Any]:
    """Return a dataset's own `facts`, and `num_classes` where `classes` or one Hugging Face label in its `features` tells it."""
    facts = dict(getattr(dataset, "facts", {}))
    if hasattr(dataset, "classes"):
        facts.setdefault("num_classes", len(dataset.classes))
    features = getattr(dataset, "features", None)
    labels = [feature for feature in features.values() if hasattr(feature, "num_classes")] if isinstance(features, Mapping) else []
    if len(labels) == 1:
        facts.setdefault("num_classes", labels[0].num_classes)
    return facts


def collate(samples: list[Any], fields: Sequence[str] | None, by: Collate | None = None) -> Batch:
    """Make a batch of samples.

    Args:
        fields: for samples that are dicts: the keys that make the batch, in this order. None: all of the sample.
        by: what makes it; None: stacked as torch's DataLoader does by default.

    Raises:
        ConfigError: a sample does not have them.
    """
    for sample in samples if fields is not None else ():
        if not isinstance(sample, Mapping) or not all(name in sample for name in fields or ()):
            what = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is a {type(sample).__name__}"
            raise ConfigError(key="loader.fields", happened=f"a sample {what}", expected=f"a dict with {', '.join(fields or ())}")
    chosen = samples if fields is None else [tuple(sample[name] for name in fields) for sample in samples]
    made = (by or default_collate)(chosen)
    return dict(made) if isinstance(made, Mapping) else made  # others have mappings of their own, as transformers' BatchEncoding


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Let the global generators of python, numpy and torch begin at a key, and go on afterwards as if nothing had been drawn."""
    before = _streams()
    _seed(key)
    try:
        yield
    finally:
        _put_back(before)


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
