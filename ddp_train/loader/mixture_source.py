"""The samples of a mixture (`data=mixture`) as one data source: those of one source after another.

Shapes: B samples, S sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import mix
from ddp_train.interfaces import (
    Augmenting,
    Batch,
    DataSource,
    Indices,
    Located,
    Measured,
    Resident,
    describe,
    map_tensors,
    tensors_of,
)
from ddp_train.loader.dataset_adapter import DatasetSource
from ddp_train.loader.mixed import Mixed, source_seed
from ddp_train.loader.sampler import plain_sampler, read_weights

_OF_ONE = ("bytes_per_token",)  # facts of a source that need not be the same in another; the mixture then has none


class MixtureSource:
    """Reads the samples of several sources, whose batches must be alike but for the number of samples.

    Args:
        parts: the sources by their names.
        weights: how often each is drawn from, beside the others.

    Raises:
        ConfigError: they are of different kinds: another number of classes, another vocabulary.
    """

    def __init__(self, parts: Mapping[str, DataSource], weights: Mapping[str, float]) -> None:
        self.names, self.parts, self.weights = list(parts), list(parts.values()), dict(weights)
        self.facts = _common(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])
        self.keys_of: Callable[[Indices], NDArray[np.uint64]] = _always_the_same
        for number, part in enumerate(self.parts):
            if isinstance(part, DatasetSource):  # its transforms draw while it is read
                part.keys_of = partial(self._keys_of_part, self._start(number))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def augments(self) -> bool:
        return any(_augments(part) for part in self.parts)

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, in that order."""
        found = [(number, rows, self.parts[number].batch(indices[rows] - self._start(number))) for number, rows in self._by_part(indices)]
        return found[0][2] if len(found) == 1 else self._together(found, len(indices))

    def augment_each(self, batch: Batch, keys: NDArray[np.uint64], indices: Indices) -> Batch:
        """Let each source change its own samples of a batch of `batch()`, as their keys say."""
        found = []
        for number, rows in self._by_part(indices):
            part = self.parts[number]
            own = batch if len(rows) == len(indices) else map_tensors(partial(_taken, rows=rows), batch)
            found.append((number, rows, part.augment(own, keys[rows]) if isinstance(part, Augmenting) and _augments(part) else own))
        return found[0][2] if len(found) == 1 else self._together(found, len(indices))

    def where(self, index: int) -> str:
        """Return a sample's source, and its file where that tells it."""
        ((number, _),) = self._by_part(np.asarray([index]))
        part, own = self.parts[number], index - self._start(number)
        return f"data.sources.{self.names[number]}, sample {own}" + (f", {part.where(own)}" if isinstance(part, Located) else "")

    def to(self, device: torch.device) -> None:
        """Keep all sources on a device."""
        for name, part in zip(self.names, self.parts, strict=True):
            if not isinstance(part, Resident):
                raise ConfigError(
                    key="loader.on_device",
                    happened=f"data.sources.{name} cannot live on the device",
                    expected="sources with to(device)",
                    fix="loader.on_device=false",
                )
            part.to(device)

    def sampler(self, *, seed: int, sampling: str, sample_weights: str | None, multiple_of: int) -> Mixed:
        """Return what draws from the sources by their weights, and from each as `loader.sampling` says.

        Raises:
            DataError: of a source all samples have the weight zero.
        """
        every = read_weights(sample_weights, len(self)) if sample_weights is not None else None
        samplers = {}
        for number, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            own = every[self._start(number) : self._ends[number]] if every is not None else None
            if own is not None and not own.any():
                raise DataError(
                    key="loader.sample_weights",
                    happened=f"has only zeros for data.sources.{name}",
                    expected="a sample to draw in each source",
                    fix=f"data.sources.{name}=null",
                )
            samplers[name] = plain_sampler(part, seed=source_seed(seed, number), sampling=sampling, weights=own)
        return Mixed(samplers, [len(part) for part in self.parts], self.weights, seed=seed, multiple_of=multiple_of)

    def _start(self, number: int) -> int:
        return int(self._ends[number]) - len(self.parts[number])

    def _keys_of_part(self, start: int, indices: Indices) -> NDArray[np.uint64]:
        return self.keys_of(indices + start)

    def _by_part(self, indices: Indices) -> list[tuple[int, Indices]]:
        """Return the sources that samples are of, each with the rows of its own."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        return [(int(number), np.flatnonzero(numbers == number)) for number in np.unique(numbers)]

    def _together(self, found: list[tuple[int, Indices, Batch]], size: int) -> Batch:
        """Put batches of several sources together, each sample at its row."""
        shown = [describe(map_tensors(lambda tensor: tensor[:1], batch)) for _, _, batch in found]
        for (number, _, _), layout in zip(found, shown, strict=True):
            if layout != shown[0]:
                raise DataError(
                    key="data.sources",
                    happened=f"{self.names[found[0][0]]} gives {shown[0]}, {self.names[number]} gives {layout}",
                    expected="samples of the same types and shapes in all sources",
                )
        columns = zip(*(tensors_of(batch) for _, _, batch in found), strict=True)
        whole = iter([_interleaved(parts, [rows for _, rows, _ in found], size) for parts in columns])
        return map_tensors(lambda _: next(whole), found[0][2])


class MeasuredMixtureSource(MixtureSource):
    """A mixture of sources that all tell how long their samples are, as `loader.bucket_batches` needs it."""

    @property
    def lengths(self) -> NDArray[Any]:
        return np.concatenate([np.asarray(each.lengths) for each in map(_offered, self.parts) if isinstance(each, Measured)])


def mixture_source(parts: Mapping[str, DataSource], weights: Mapping[str, float]) -> MixtureSource:
    """Return the source of a mixture; the arguments are those of `MixtureSource`."""
    is_measured = all(isinstance(_offered(part), Measured) for part in parts.values())
    return (MeasuredMixtureSource if is_measured else MixtureSource)(parts, weights)


def _offered(part: DataSource) -> Any:
    return part.dataset if isinstance(part, DatasetSource) else part


def _interleaved(parts: tuple[Tensor, ...], rows: list[Indices], size: int) -> Tensor:
    whole = parts[0].new_empty((size, *parts[0].shape[1:]))
    for part, places in zip(parts, rows, strict=True):
        whole[torch.from_numpy(places).to(whole.device, non_blocking=True)] = part
    return whole


def _taken(tensor: Tensor, rows: Indices) -> Tensor:
    return tensor[torch.from_numpy(rows).to(tensor.device, non_blocking=True)]


def _augments(part: DataSource) -> bool:
    return isinstance(part, Augmenting) and bool(getattr(part, "augments", True))


def _common(parts: Mapping[str, DataSource]) -> dict[str, Any]:
    """Return the facts of all sources, which must not contradict each other."""
    facts: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for name, part in parts.items():
        for fact, value in part.facts.items():
            if fact in facts and facts[fact] != value and fact not in _OF_ONE:
                raise ConfigError(
                    key=f"data.sources.{name}",
                    happened=f"has {fact} {value}, and data.sources.{said_by[fact]} has {facts[fact]}",
                    expected="sources of one kind",
                )
            facts[fact] = value if facts.get(fact, value) == value else None
            said_by.setdefault(fact, name)
    return {fact: value for fact, value in facts.items() if value is not None}


def _always_the_same(indices: Indices) -> NDArray[np.uint64]:
    return mix(indices.astype(np.uint64))
