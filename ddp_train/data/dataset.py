"""Use any `torch.utils.data.Dataset` as a data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, DataSource, Indices


class DatasetSource:
    """A map-style dataset, read a batch at a time: by `__getitems__` where it has that, else item by item.

    Facts are the dataset's own `facts`, if any, and `num_classes` where it has `classes`.
    Random transforms inside the dataset draw from the process's generators: unlike `augment`, they change with ranks and restarts.

    Args:
        fields: the keys of a sample that make the batch, in this order; None: all of the sample.

    Raises:
        TypeError: the dataset has no length or no positions.
    """

    def __init__(self, dataset: Any, fields: Sequence[str] | None = None) -> None:
        name = type(dataset).__name__
        if isinstance(dataset, Mapping):
            raise TypeError(
                f"{name} has several splits ({', '.join(map(str, dataset))}): choose one, as data.split={next(iter(dataset), '')}"
            )
        for method, what in {"__len__": "how many samples there are", "__getitem__": "the sample at a position"}.items():
            if not hasattr(type(dataset), method):
                raise TypeError(f"{name} has no {method}: a dataset must tell {what}")
        self.dataset = dataset
        self._fields = fields

    @property
    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, collated as torch's DataLoader does by default."""
        positions = [int(index) for index in indices]
        if hasattr(self.dataset, "__getitems__"):
            return collate(self.dataset.__getitems__(positions), self._fields)
        return collate([self.dataset[position] for position in positions], self._fields)


def as_source(candidate: Any, fields: Sequence[str] | None = None) -> DataSource:
    """Return `candidate` when it is a data source already, else a `DatasetSource` of it."""
    if not isinstance(candidate, DataSource):
        return DatasetSource(candidate, fields)
    if fields is not None:
        raise ConfigError(key="data.fields", happened=f"{type(candidate).__name__} gives whole batches", expected="null")
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


def collate(samples: list[Any], fields: Sequence[str] | None) -> Batch:
    """Stack samples as torch's DataLoader does by default.

    Args:
        fields: for samples that are dicts: the keys that make the batch, in this order. None: all of the sample.

    Raises:
        ConfigError: a sample does not have them.
    """
    if fields is None:
        return default_collate(samples)
    for sample in samples:
        if not isinstance(sample, Mapping) or not all(name in sample for name in fields):
            what = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is a {type(sample).__name__}"
            raise ConfigError(key="data.fields", happened=f"a sample {what}", expected=f"a dict with {', '.join(fields)}")
    return default_collate([tuple(sample[name] for name in fields) for sample in samples])
