"""Use any `torch.utils.data.Dataset` as a data source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from ddp_train.errors import ConfigError
from ddp_train.hashing import mix
from ddp_train.interfaces import Batch, DataSource, Indices, Measured
from ddp_train.loader.collate import Collate, collate
from ddp_train.loader.global_streams import Stream, Watched
from ddp_train.loader.stream_shard import comes_from


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
        self._reading, self._collating = Watched(), Watched()
        self.keys_of: Callable[[Indices], NDArray[np.uint64]] = _always_the_same
        """What the generators are seeded with for each sample, as in `Augmenting`: in training it depends on the epoch."""

    @property
    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, collated."""
        if self._by is not None:
            return self._collating.run(partial(self._collated, indices))
        if self._fields is None and type(self.dataset) is TensorDataset:  # its samples are rows, which are had at once
            rows = torch.from_numpy(indices)
            return [tensor[rows] for tensor in self.dataset.tensors]
        return collate(self._reading.run(partial(self._samples, indices)), self._fields)

    def _collated(self, indices: Indices, drawn: Sequence[Stream]) -> Batch:
        """Let the user's collate make a batch; it draws from the streams in `drawn`."""
        samples = self._reading.run(partial(self._samples, indices))
        key = int(np.add.reduce(self.keys_of(indices))) if drawn else 0
        for stream in drawn:
            stream.seed(key)
        return collate(samples, self._fields, self._by)

    def _samples(self, indices: Indices, drawn: Sequence[Stream]) -> list[Any]:
        """Read samples; their transforms draw from the streams in `drawn`, each sample from where it says."""
        positions = indices.tolist()
        if not drawn:
            return self._read(positions)
        samples = []
        for position, key in zip(positions, self.keys_of(indices).tolist(), strict=True):
            for stream in drawn:
                stream.seed(key)
            samples += self._read([position])
        return samples

    def _read(self, positions: list[int]) -> list[Any]:
        dataset = self.dataset
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(positions))
        return [dataset[position] for position in positions]


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


def _always_the_same(indices: Indices) -> NDArray[np.uint64]:
    return mix(indices.astype(np.uint64))


def lengths_of(source: DataSource) -> Any:
    """Return how long each sample is, as the data tells it: an array of numbers; None: it does not."""
    offered = source.dataset if isinstance(source, DatasetSource) else source
    return offered.lengths if isinstance(offered, Measured) else None
