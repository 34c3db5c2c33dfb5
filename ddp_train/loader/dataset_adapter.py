"""Use any `torch.utils.data.Dataset` as a data source, and make batches of its samples: as torch's DataLoader does, in less time.

An iterable dataset (Hugging Face, WebDataset, torch's) is a `Stream`: its samples come one after another and have no positions (stream.py).

A batch is that of torch's `default_collate`, which gets all that is not listed here, and all samples once a user has added types to its
map. Fields of numbers or of arrays take less time here: numpy makes one array of a field, where torch looks at every number or array.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import Keys, mix
from ddp_train.interfaces import Batch, DataSource, Indices
from ddp_train.interfaces.batch import describe
from ddp_train.loader.global_generators import GlobalGenerator, Watched
from ddp_train.traits import Adapted, lacking, member_of

Collate = Callable[[list[Any]], Batch]
"""Makes a batch of samples, as the DataLoader's `collate_fn`."""
_NUMBERS: dict[type, np.dtype[Any]] = {
    kind: np.dtype(kind)
    for kind in (bool, int, float, np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64)
}
"""Types of numbers, and the dtype of a tensor of them."""
_DTYPES = frozenset(_NUMBERS.values())


class DatasetFacts:
    """The facts that a third-party dataset may have, under the names of `DataSource`."""

    dataset: Any

    @property
    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.dataset)

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        if isinstance(fingerprint := member_of(self.dataset, "fingerprint"), Mapping):
            return fingerprint
        if not isinstance(self.dataset, TensorDataset) or not len(self.dataset):
            return {}
        rows = [tensor[index].cpu().contiguous() for index in (0, -1) for tensor in self.dataset.tensors]
        return {"first_and_last": [xxhash.xxh3_64_hexdigest(row.view(-1).view(torch.uint8).numpy().tobytes()) for row in rows]}

    @property
    def meaning(self) -> Mapping[str, Any]:
        if isinstance(meaning := member_of(self.dataset, "meaning"), Mapping) and meaning:
            return meaning
        classes = member_of(self.dataset, "classes")
        if classes is None and (label := label_of(self.dataset)):
            classes = getattr(self.dataset.features[label], "names", None)
        return {"classes": list(classes)} if isinstance(classes, (list, tuple)) else {}

    def use_meaning(self, meaning: Mapping[str, Any]) -> None:
        if use_meaning := member_of(self.dataset, "use_meaning"):
            use_meaning(meaning)


class DatasetSource(DatasetFacts, DataSource):
    """A map-style dataset, read a batch at a time: by `__getitems__` where it has that, else item by item.

    Transforms may draw from the global generators of python, numpy and torch, which are seeded for each sample: it looks the same whatever
    the number of ranks, workers or restarts, and the process's own streams go on as if nothing had been drawn. A dataset's own generators
    are out of our reach. A Hugging Face dataset without a format gives tensors.

    Args:
        fields: the keys of a sample that make the batch, in this order; None: all of the sample.
        collate_fn: makes the batch of the samples; None: torch's default. It may draw, too: its seed depends on its samples.

    Raises TypeError: the dataset has no length or no positions.
    """

    def __init__(self, dataset: Any, fields: Sequence[str] | None = None, collate_fn: Collate | None = None) -> None:
        name = type(dataset).__name__
        if isinstance(dataset, Mapping):
            splits = ", ".join(map(str, dataset))
            raise TypeError(f"{name} has several splits ({splits}): choose one, as data.split={next(iter(dataset), '')}")
        for method, what in {"__len__": "the number of samples", "__getitem__": "the sample at a position"}.items():
            if not hasattr(type(dataset), method):
                raise TypeError(f"{name} has no {method}: a dataset must provide {what}")
        has_no_format = comes_from(dataset, "datasets") and dataset.format["type"] is None
        # As tensors: torch's way of stacking turns lists of numbers, which Hugging Face gives else, on their side.
        self.dataset = dataset.with_format("torch") if has_no_format else dataset
        self._fields, self._collate_fn = fields, collate_fn
        self._reading, self._collating = Watched(), Watched()
        self._keys_of: Callable[[Indices], Keys] = keys_without_epochs  # which the generators are seeded with for each sample

    def seed_reads(self, keys_of: Callable[[Indices], Keys]) -> None:
        self._keys_of = keys_of

    @property
    def labels(self) -> Any:
        return member_of(self.dataset, "labels")

    @property
    def lengths(self) -> Any:
        return member_of(self.dataset, "lengths")

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Indices) -> Batch:
        if self._collate_fn is not None:
            return self._collating.run(partial(self._collated, indices))
        if self._fields is None and type(self.dataset) is TensorDataset:  # its samples are rows, which are had at once
            rows = torch.from_numpy(indices)
            return [tensor[rows] for tensor in self.dataset.tensors]
        return collate(self._reading.run(partial(self._samples, indices)), self._fields)

    def _collated(self, indices: Indices, drawn: Sequence[GlobalGenerator]) -> Batch:
        samples = self._reading.run(partial(self._samples, indices))
        key = int(np.add.reduce(self._keys_of(indices))) if drawn else 0
        for generator in drawn:
            generator.seed(key)
        return collate(samples, self._fields, self._collate_fn)

    def _samples(self, indices: Indices, drawn: Sequence[GlobalGenerator]) -> list[Any]:
        """Read samples; their transforms draw from the generators in `drawn`, each sample from where it says."""
        if not drawn:
            return self._read(indices.tolist())
        samples = []
        for position, key in zip(indices.tolist(), self._keys_of(indices).tolist(), strict=True):
            for generator in drawn:
                generator.seed(key)
            samples += self._read([position])
        return samples

    def _read(self, positions: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(positions))
        return [self.dataset[position] for position in positions]


class Stream(DatasetFacts):
    """An iterable dataset as it is used here.

    Args:
        dataset: an iterable of samples. Where it has them, `set_epoch`, `state_dict` and `load_state_dict` are used.
        fields: the keys of a sample that make the batch, in this order; None: all of the sample.
        collate_fn: what makes a batch of samples; None: torch's default.
    """

    lengths = None  # of the samples

    def __init__(self, dataset: Any, fields: Sequence[str] | None = None, collate_fn: Collate | None = None) -> None:
        # As tensors: torch's way of stacking turns lists of numbers, which Hugging Face gives else, on their side.
        self.dataset = dataset.with_format("torch") if comes_from(dataset, "datasets") else dataset
        self._fields, self._collate_fn = fields, collate_fn

    def collate(self, samples: list[Any]) -> Batch:
        return collate(samples, self._fields, self._collate_fn)

    @property
    def length(self) -> int | None:
        """The number of samples of a pass; None: the dataset does not say."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError, AttributeError):
            return None

    @property
    def has_state(self) -> bool:
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")


class AdaptedSource(Adapted, DataSource, base=DataSource):
    """A data source whose class does not inherit from ours, read by its own `batch`."""

    @property
    def dataset(self) -> Any:
        return self.wrapped

    @property
    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.wrapped)

    def __len__(self) -> int:
        return len(self.wrapped)

    def batch(self, indices: Indices) -> Batch:
        return self.wrapped.batch(indices)


Source = DataSource | Stream
"""Data as the loaders read it: with positions, or without."""


def is_stream(candidate: Any) -> bool:
    return isinstance(candidate, IterableDataset) or (hasattr(candidate, "__iter__") and not hasattr(candidate, "__getitem__"))


def as_source(candidate: Any, fields: Sequence[str] | None = None, collate_fn: Collate | None = None) -> DataSource:
    """Return a data source as one of ours, anything else as a `DatasetSource`."""
    is_ours = isinstance(candidate, DataSource)
    if not is_ours and lacking(candidate, DataSource):
        return DatasetSource(candidate, fields, collate_fn)
    for key, value in {"loader.fields": fields, "loader.collate": collate_fn}.items():
        if value is not None:
            raise ConfigError(key=key, happened=f"is given, and {type(candidate).__name__} gives whole batches", expected="null")
    return candidate if is_ours else AdaptedSource(candidate)


def dataset_of(source: DataSource) -> Any:
    return source.dataset if isinstance(source, (DatasetFacts, AdaptedSource)) else source


def facts_of(dataset: Any) -> Mapping[str, Any]:
    """Return a dataset's own `facts`, and `num_classes` where `classes` or one Hugging Face label in its `features` tells it."""
    facts = dict(member_of(dataset, "facts", {}))
    if (classes := member_of(dataset, "classes")) is not None:
        facts.setdefault("num_classes", len(classes))
    if label := label_of(dataset):
        facts.setdefault("num_classes", dataset.features[label].num_classes)
    return facts


def label_of(dataset: Any) -> str | None:
    """Return the one column of a Hugging Face dataset that is a label; None: there is none, or several."""
    features = member_of(dataset, "features")
    names = [name for name, feature in features.items() if hasattr(feature, "num_classes")] if isinstance(features, Mapping) else []
    return names[0] if len(names) == 1 else None


def keys_without_epochs(indices: Indices) -> Keys:
    """Return the seeds of samples outside of training: always the same."""
    return mix(indices.astype(np.uint64))


def collate(samples: list[Any], fields: Sequence[str] | None, collate_fn: Collate | None = None) -> Batch:
    """Make a batch of samples.

    Args:
        fields: for samples that are dicts: the keys that make the batch, in this order. None: all of the sample.
        collate_fn: what makes it; None: stacked as torch's DataLoader does by default.

    Raises ConfigError: a sample does not have them.
    Raises DataError: the samples differ in shape or type.
    """
    if fields is not None:
        for sample in samples:
            if not isinstance(sample, Mapping) or not all(name in sample for name in fields or ()):
                what = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is a {type(sample).__name__}"
                raise ConfigError(key="loader.fields", happened=f"a sample {what}", expected=f"a dict with {', '.join(fields or ())}")
    chosen = samples if fields is None else [tuple(sample[name] for name in fields) for sample in samples]
    batch = collate_fn(chosen) if collate_fn else _together(chosen)
    return dict(batch) if isinstance(batch, Mapping) else batch  # others have mappings of their own, as transformers' BatchEncoding


def _together(samples: list[Any]) -> Batch:
    try:
        is_unchanged = all(collates.__module__ == default_collate.__module__ for collates in default_collate_fn_map.values())
        return _stacked(samples) if is_unchanged else default_collate(samples)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        first = describe(samples[0])
        other = next((text for text in map(describe, samples) if text != first), None)
        if other is None:  # then each of them cannot be stacked alone either: reading them one by one says which
            raise
        happened = f"samples of a batch cannot be stacked: one is {first}, another {other}"
        fix = "+loader.collate._target_=my_package.my_function: a function that makes a batch of them, for example by padding"
        raise DataError(key="loader.collate", happened=happened, expected="the same shapes and types in every sample", fix=fix) from error


def _stacked(samples: Any) -> Any:
    """Return the batch that `default_collate` would return. The first sample decides on the kind of a field, as it does there."""
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor and first.layout is torch.strided and not first.is_nested:
        return torch.stack(samples)
    if kind is dict:
        return {name: _stacked([sample[name] for sample in samples]) for name in first}
    if (kind is tuple or kind is list) and set(map(len, samples)) == {len(first)}:
        return [_stacked(field) for field in zip(*samples, strict=True)]  # a list of tuples' fields, too
    quick = _one_array(samples, first, kind) if kind in _NUMBERS or kind is np.ndarray else None
    return default_collate(samples) if quick is None else torch.from_numpy(quick)


def _one_array(samples: Sequence[Any], first: Any, kind: type) -> NDArray[Any] | None:
    """Return a new array of numbers or of arrays, all of one type and shape; None: they differ, or torch has no such type."""
    if set(map(type, samples)) != {kind}:
        return None
    if kind is np.ndarray and (first.dtype not in _DTYPES or {array.dtype for array in samples} != {first.dtype}):
        return None
    try:
        return np.array(samples, _NUMBERS.get(kind))
    except (OverflowError, ValueError):  # torch says it in its own words
        return None


def comes_from(dataset: Any, package: str) -> bool:
    """Tell whether a dataset's class is one of a package's, without importing it."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(dataset).__mro__)
