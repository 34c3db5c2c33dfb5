"""Use any `torch.utils.data.Dataset` as a data source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ddp_train.interfaces import Batch, DataSource, Indices


class DatasetSource:
    """A map-style dataset, read a batch at a time: by `__getitems__` where it has that, else item by item.

    Facts are the dataset's own `facts`, if any, and `num_classes` where it has `classes`.
    Random transforms inside the dataset draw from the process's generators: unlike `augment`, they change with ranks and restarts.

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
        positions = [int(index) for index in indices]
        if hasattr(self.dataset, "__getitems__"):
            return default_collate(self.dataset.__getitems__(positions))
        return default_collate([self.dataset[position] for position in positions])


def as_source(candidate: Any) -> DataSource:
    """Return `candidate` when it is a data source already, else a `DatasetSource` of it."""
    return candidate if isinstance(candidate, DataSource) else DatasetSource(candidate)
