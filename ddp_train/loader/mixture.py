"""A mixture of data sets (`data=mixture`): their samples as one data source, and which of them comes when.

Each source comes as often as its weight says, in an order and with epochs of its own. Positions are counted from the run's start and cut
into blocks. A source has its share of the positions of the first k blocks, rounded; a keyed order places it within a block. So seeking
needs no other block, and nothing depends on ranks, workers or restarts.
Shapes: B samples, S sources, n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.errors import ConfigError, DataError, one_line
from ddp_train.hashing import Keys
from ddp_train.interfaces import Batch, DataSource, Indices, Sampler
from ddp_train.interfaces.batch import describe, map_tensors, tensors_of
from ddp_train.loader.dataset_adapter import keys_without_epochs
from ddp_train.loader.sampler import hashes_of, key_of, plain_sampler, read_weights

_BLOCK = 1 << 12  # positions: long enough that a batch is drawn at random, short enough to be computed in a third of a millisecond
_WHOLE = 1 << 32  # what shares are parts of
_HELD = 16  # blocks
_PLACES, _SOURCE = 6, 7  # what a key is for; sampler.py has the others
_OF_ONE = ("bytes_per_token", "mean", "std")  # what need not be the same in another source; the mixture then has none
_MAX_CHARACTERS = 300  # of two values that differ


class MixtureSource(DataSource):
    """Reads the samples of several sources, whose batches must be alike but for the number of samples.

    Args:
        sources: by their names. They have the numbers of the first one, where they can use them: one vocabulary for all.
        weights: how often each source is drawn from, relative to the others.
    """

    def __init__(self, sources: Mapping[str, DataSource], weights: Mapping[str, float]) -> None:
        self._names, self._sources, self._weights = list(sources), list(sources.values()), dict(weights)
        self._ends = np.cumsum([len(source) for source in self._sources])
        self.use_meaning(self._sources[0].meaning)
        self.seed_reads(keys_without_epochs)

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._facts

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Weight, number of samples and fingerprint of each source."""
        fingerprint: dict[str, Any] = {}
        for name, source in zip(self._names, self._sources, strict=True):
            facts = {"weight": self._weights[name], "samples": len(source), **source.fingerprint}
            fingerprint |= {f"sources.{name}.{key}": value for key, value in facts.items()}
        return fingerprint

    @property
    def meaning(self) -> Mapping[str, Any]:
        """What it is in all sources; a ConfigError where it is not the same."""
        return self._common(lambda source: source.meaning, "sources whose numbers mean the same")

    def use_meaning(self, meaning: Mapping[str, Any]) -> None:
        for source in self._sources:
            source.use_meaning(meaning)
        self._facts = self._common(lambda source: source.facts, "sources of one kind")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def augments(self) -> bool:
        return any(source.augments for source in self._sources)

    @property
    def lengths(self) -> NDArray[Any] | None:
        known = [np.asarray(lengths) for source in self._sources if (lengths := source.lengths) is not None]
        return np.concatenate(known) if len(known) == len(self._sources) else None

    def batch(self, indices: Indices) -> Batch:
        parts = [(number, rows, self._sources[number].batch(indices[rows] - self._start(number))) for number, rows in self._rows(indices)]
        return self._joined(parts, len(indices))

    def augment(self, batch: Batch, keys: Keys, indices: Indices) -> Batch:
        parts = []
        for number, rows in self._rows(indices):
            source = self._sources[number]
            part = batch if len(rows) == len(indices) else map_tensors(partial(_rows_of, rows=rows), batch)
            if source.augments:
                part = source.augment(part, keys[rows], indices[rows] - self._start(number))
            parts.append((number, rows, part))
        return self._joined(parts, len(indices))

    def seed_reads(self, keys_of: Callable[[Indices], Keys]) -> None:
        for number, source in enumerate(self._sources):
            source.seed_reads(partial(_keys_from, self._start(number), keys_of))

    def where(self, index: int) -> str:
        ((number, _),) = self._rows(np.asarray([index]))
        index -= self._start(number)
        place = self._sources[number].where(index)
        return f"data.sources.{self._names[number]}, sample {index}" + (f", {place}" if place else "")

    def to(self, device: torch.device) -> None:
        for source in self._sources:
            source.to(device)

    def sampler(self, *, seed: int, sampling: str, sample_weights: str | None, multiple_of: int) -> MixtureSampler:
        """Return a sampler that draws from the sources by their weights, and from each as `loader.sampling` says."""
        all_weights = read_weights(sample_weights, len(self)) if sample_weights is not None else None
        samplers = {}
        for number, (name, source) in enumerate(zip(self._names, self._sources, strict=True)):
            weights = all_weights[self._start(number) : self._ends[number]] if all_weights is not None else None
            if weights is not None and not weights.any():
                happened = f"has only zeros for data.sources.{name}"
                expected = "a sample to draw in each source"
                raise DataError(key="loader.sample_weights", happened=happened, expected=expected, fix=f"data.sources.{name}=null")
            samplers[name] = plain_sampler(source, seed=key_of(seed, number, _SOURCE), sampling=sampling, weights=weights)
        return MixtureSampler(samplers, [len(source) for source in self._sources], self._weights, seed=seed, multiple_of=multiple_of)

    def _start(self, number: int) -> int:
        return int(self._ends[number]) - len(self._sources[number])

    def _rows(self, indices: Indices) -> list[tuple[int, Indices]]:
        """Return the numbers of the sources that have samples of a batch, each with its rows of it."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        return [(int(number), np.flatnonzero(numbers == number)) for number in np.unique(numbers)]

    def _joined(self, parts: list[tuple[int, Indices, Batch]], size: int) -> Batch:
        """Return one batch of parts: the number of a source, its rows, and the batch of these rows."""
        first, _, first_batch = parts[0]
        if len(parts) == 1:
            return first_batch
        layouts = [describe(map_tensors(lambda tensor: tensor[:1], batch)) for _, _, batch in parts]
        for (number, _, _), layout in zip(parts, layouts, strict=True):
            if layout != layouts[0]:
                happened = f"{self._names[first]} gives {layouts[0]}, {self._names[number]} gives {layout}"
                raise DataError(key="data.sources", happened=happened, expected="samples of the same types and shapes in all sources")
        columns = zip(*(tensors_of(batch) for _, _, batch in parts), strict=True)
        whole = iter([_interleaved(tensors, [rows for _, rows, _ in parts], size) for tensors in columns])
        return map_tensors(lambda _: next(whole), first_batch)

    def _common(self, ask: Callable[[DataSource], Mapping[str, Any]], expected: str) -> dict[str, Any]:
        """Return the values that all sources share. ConfigError: two differ, in a value that must not be a source's own."""
        common: dict[str, Any] = {}
        said_by: dict[str, str] = {}
        for name, source in zip(self._names, self._sources, strict=True):
            for key, value in ask(source).items():
                known, first = common.setdefault(key, value), said_by.setdefault(key, name)
                if known != value and key not in _OF_ONE:
                    happened = one_line(f"has {key} {value}, and data.sources.{first} has {known}", _MAX_CHARACTERS)
                    raise ConfigError(key=f"data.sources.{name}", happened=happened, expected=expected)
                common[key] = value if known == value else None
        return {key: value for key, value in common.items() if value is not None}


def _keys_from(start: int, keys_of: Callable[[Indices], Keys], indices: Indices) -> Keys:
    return keys_of(indices + start)


def _interleaved(tensors: tuple[Tensor, ...], rows: list[Indices], size: int) -> Tensor:
    whole = tensors[0].new_empty((size, *tensors[0].shape[1:]))
    for tensor, its_rows in zip(tensors, rows, strict=True):
        whole[torch.from_numpy(its_rows).to(whole.device, non_blocking=True)] = tensor
    return whole


def _rows_of(tensor: Tensor, rows: Indices) -> Tensor:
    return tensor[torch.from_numpy(rows).to(tensor.device, non_blocking=True)]


class MixtureSampler:
    """Draws from several sources by weight. An epoch is as many draws as they have samples together.

    A source's visits go through its sampler's epochs: with `Shuffled` each of its samples comes once before any comes again.

    Args:
        samplers: of each source, by its name; their indices count from 0.
        lengths: samples of each source. The mixture's indices have one source after another.
        weights: above 0, of any sum.
        multiple_of: the epoch's length is one, rounded down: where the last batch is left out, no visit is lost with it.
    """

    repeats, window = True, 1

    def __init__(
        self, samplers: Mapping[str, Sampler], lengths: Sequence[int], weights: Mapping[str, float], *, seed: int, multiple_of: int = 1
    ) -> None:
        self.seed, self.names = seed, list(samplers)
        self.length = sum(lengths) - sum(lengths) % multiple_of
        self._samplers = list(samplers.values())
        self._offsets = np.cumsum([0, *lengths[:-1]])
        self._borders = _borders({name: weights[name] for name in samplers})

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        sources, visits = self._visits(positions + epoch * self.length)
        indices = np.empty(len(positions), np.int64)
        for source in np.unique(sources):
            sampler, mine = self._samplers[source], np.flatnonzero(sources == source)
            passes, places = np.divmod(visits[mine], sampler.length)
            for number in np.unique(passes):
                these = passes == number
                indices[mine[these]] = self._offsets[source] + sampler(int(number), places[these])
        return indices

    def samples_by_source(self, position: int) -> dict[str, int]:
        block, place = divmod(position, _BLOCK)
        sources, _ = _block(block, self.seed, self._borders)
        counts = _counts_before(block, self._borders) + np.bincount(sources[:place], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _visits(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position of the run, and how often it has come before."""
        blocks, places = np.divmod(positions, _BLOCK)
        sources, visits = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(blocks):
            these = blocks == number
            sources_there, visits_there = _block(int(number), self.seed, self._borders)
            sources[these], visits[these] = sources_there[places[these]], visits_there[places[these]]
        return sources, visits


@lru_cache(maxsize=_HELD)
def _block(number: int, seed: int, borders: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Return the source at each place of a block, and which of its visits that is."""
    first_visits = _counts_before(number, borders)
    counts = _counts_before(number + 1, borders) - first_visits
    order = np.argsort(hashes_of(np.arange(_BLOCK), key_of(seed, number, _PLACES)))
    sources = np.repeat(np.arange(len(counts)), counts)[order]
    by_source = [np.arange(first, first + count) for first, count in zip(first_visits, counts, strict=True)]
    visits = np.empty(_BLOCK, np.int64)
    visits[np.argsort(sources, kind="stable")] = np.concatenate(by_source)
    return sources, visits


def _counts_before(block: int, borders: tuple[int, ...]) -> Indices:
    """Return how often each source comes before a block. Borders are rounded, and not shares: the sum is that of the positions."""
    return np.diff([(block * _BLOCK * border) // _WHOLE for border in borders])


def _borders(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Return the bounds of the sources in the whole: the beginning of each, and the end of the last one.

    A source has a share of one in a block at least: else rounding could let it come less than 0 times in a block.
    """
    for name, weight in weights.items():
        if not 0 < weight < np.inf:
            raise _refused(name, weight, "a number above 0", f"data.sources.{name}=null leaves it out")
    total = sum(weights.values())
    borders = (0, *(round(_WHOLE * part / total) for part in accumulate(weights.values())))
    for (name, weight), low, high in zip(weights.items(), borders[:-1], borders[1:], strict=True):
        if (high - low) * _BLOCK < _WHOLE:
            raise _refused(name, weight, f"a share of 1 in {_BLOCK:,} at least", f"a larger weight; data.sources.{name}=null leaves it out")
    return borders


def _refused(name: str, weight: float, expected: str, fix: str) -> ConfigError:
    return ConfigError(key=f"data.sources.{name}.weight", happened=f"is {weight}", expected=expected, fix=fix)
