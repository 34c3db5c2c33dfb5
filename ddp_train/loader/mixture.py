"""A mixture of data sets (`data=mixture`): their samples as one data source, and which of them comes when.

Each source comes as often as its weight says, in an order and with epochs of its own. Positions are counted from the run's start and cut
into blocks. How often a source comes in the first k blocks is its share of their positions, rounded; at which places of a block is a keyed
order. So the visit that a position is to its source needs no other block: seeking costs nothing, and nothing depends on ranks, workers or
restarts.
Shapes: B samples, S sources, n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import Keys
from ddp_train.interfaces import Batch, DataSource, Indices, Sampler, describe, map_tensors, tensors_of
from ddp_train.loader.dataset_adapter import DatasetSource, keys_without_epochs
from ddp_train.loader.sampler import hashes_of, key_of, plain_sampler, read_weights

_BLOCK = 1 << 12  # positions: long enough that a batch is drawn at random, short enough to be computed in a third of a millisecond
_WHOLE = 1 << 32  # what shares are parts of
_HELD = 16  # blocks
_PLACES, _SOURCE = 6, 7  # what a key is for; sampler.py has the others
_OF_ONE = ("bytes_per_token",)  # facts of a source that need not be the same in another; the mixture then has none


class MixtureSource(DataSource):
    """Reads the samples of several sources, whose batches must be alike but for the number of samples.

    Args:
        parts: the sources by their names.
        weights: how often each source is drawn from, relative to the others.
    """

    def __init__(self, parts: Mapping[str, DataSource], weights: Mapping[str, float]) -> None:
        self.names, self.parts, self.weights = list(parts), list(parts.values()), dict(weights)
        self._facts = _common(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])
        self.keys_of: Callable[[Indices], Keys] = keys_without_epochs
        for number, part in enumerate(self.parts):
            if isinstance(part, DatasetSource):  # its transforms draw while it is read
                part.keys_of = partial(self._keys_of_part, self._start(number))

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._facts

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def augments(self) -> bool:
        return any(part.augments for part in self.parts)

    @property
    def lengths(self) -> NDArray[Any] | None:
        every = [part.lengths for part in self.parts]
        known = [np.asarray(lengths) for lengths in every if lengths is not None]
        return np.concatenate(known) if len(known) == len(every) else None

    def batch(self, indices: Indices) -> Batch:
        found = [(number, rows, self.parts[number].batch(indices[rows] - self._start(number))) for number, rows in self._by_part(indices)]
        return found[0][2] if len(found) == 1 else self._together(found, len(indices))

    def augment_each(self, batch: Batch, keys: Keys, indices: Indices) -> Batch:
        """Let each source change its own samples of a batch of `batch()`, as their keys say."""
        found = []
        for number, rows in self._by_part(indices):
            part = self.parts[number]
            own = batch if len(rows) == len(indices) else map_tensors(partial(_rows_of, rows=rows), batch)
            found.append((number, rows, part.augment(own, keys[rows]) if part.augments else own))
        return found[0][2] if len(found) == 1 else self._together(found, len(indices))

    def where(self, index: int) -> str:
        ((number, _),) = self._by_part(np.asarray([index]))
        part, own = self.parts[number], index - self._start(number)
        return f"data.sources.{self.names[number]}, sample {own}" + (f", {place}" if (place := part.where(own)) else "")

    def to(self, device: torch.device) -> None:
        for part in self.parts:
            part.to(device)

    def sampler(self, *, seed: int, sampling: str, sample_weights: str | None, multiple_of: int) -> Mixed:
        """Return what draws from the sources by their weights, and from each as `loader.sampling` says."""
        every = read_weights(sample_weights, len(self)) if sample_weights is not None else None
        samplers = {}
        for number, (name, part) in enumerate(zip(self.names, self.parts, strict=True)):
            own = every[self._start(number) : self._ends[number]] if every is not None else None
            if own is not None and not own.any():
                happened = f"has only zeros for data.sources.{name}"
                expected = "a sample to draw in each source"
                raise DataError(key="loader.sample_weights", happened=happened, expected=expected, fix=f"data.sources.{name}=null")
            samplers[name] = plain_sampler(part, seed=key_of(seed, number, _SOURCE), sampling=sampling, weights=own)
        return Mixed(samplers, [len(part) for part in self.parts], self.weights, seed=seed, multiple_of=multiple_of)

    def _start(self, number: int) -> int:
        return int(self._ends[number]) - len(self.parts[number])

    def _keys_of_part(self, start: int, indices: Indices) -> Keys:
        return self.keys_of(indices + start)

    def _by_part(self, indices: Indices) -> list[tuple[int, Indices]]:
        numbers = np.searchsorted(self._ends, indices, side="right")
        return [(int(number), np.flatnonzero(numbers == number)) for number in np.unique(numbers)]

    def _together(self, found: list[tuple[int, Indices, Batch]], size: int) -> Batch:
        shown = [describe(map_tensors(lambda tensor: tensor[:1], batch)) for _, _, batch in found]
        for (number, _, _), layout in zip(found, shown, strict=True):
            if layout != shown[0]:
                happened = f"{self.names[found[0][0]]} gives {shown[0]}, {self.names[number]} gives {layout}"
                raise DataError(key="data.sources", happened=happened, expected="samples of the same types and shapes in all sources")
        columns = zip(*(tensors_of(batch) for _, _, batch in found), strict=True)
        whole = iter([_interleaved(parts, [rows for _, rows, _ in found], size) for parts in columns])
        return map_tensors(lambda _: next(whole), found[0][2])


def _interleaved(parts: tuple[Tensor, ...], rows: list[Indices], size: int) -> Tensor:
    whole = parts[0].new_empty((size, *parts[0].shape[1:]))
    for part, places in zip(parts, rows, strict=True):
        whole[torch.from_numpy(places).to(whole.device, non_blocking=True)] = part
    return whole


def _rows_of(tensor: Tensor, rows: Indices) -> Tensor:
    return tensor[torch.from_numpy(rows).to(tensor.device, non_blocking=True)]


def _common(parts: Mapping[str, DataSource]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for name, part in parts.items():
        for fact, value in part.facts.items():
            known, first = facts.setdefault(fact, value), said_by.setdefault(fact, name)
            if known != value and fact not in _OF_ONE:
                happened = f"has {fact} {value}, and data.sources.{first} has {known}"
                raise ConfigError(key=f"data.sources.{name}", happened=happened, expected="sources of one kind")
            facts[fact] = value if known == value else None
    return {fact: value for fact, value in facts.items() if value is not None}


class Mixed:
    """Draws from several sources by weight. An epoch is as many draws as they have samples together.

    A source's visits go through its sampler's epoch, then through the next one: with `Shuffled` each of its samples comes once before
    any comes again.

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
        self._blocks: dict[int, tuple[Indices, Indices]] = {}

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

    def used(self, samples: int) -> dict[str, int]:
        block, place = divmod(samples, _BLOCK)
        counts = self._before(block) + np.bincount(self._block(block)[0][:place], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}  # for data-loader workers: each draws for itself

    def _visits(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position of the run, and how often it has come before."""
        blocks, places = np.divmod(positions, _BLOCK)
        sources, visits = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(blocks):
            these = blocks == number
            sources_there, visits_there = self._block(int(number))
            sources[these], visits[these] = sources_there[places[these]], visits_there[places[these]]
        return sources, visits

    def _block(self, number: int) -> tuple[Indices, Indices]:
        """Return the source at each place of a block, and which of its visits that is."""
        if number not in self._blocks:
            before = self._before(number)
            counts = self._before(number + 1) - before
            order = np.argsort(hashes_of(np.arange(_BLOCK), key_of(self.seed, number, _PLACES)))
            sources = np.repeat(np.arange(len(counts)), counts)[order]
            visits = np.empty(_BLOCK, np.int64)
            visits[np.argsort(sources, kind="stable")] = np.concatenate(
                [np.arange(first, first + count) for first, count in zip(before, counts, strict=True)]
            )
            while len(self._blocks) >= _HELD:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = sources, visits
        return self._blocks[number]

    def _before(self, block: int) -> Indices:
        """Return how often each source comes before a block. Borders are rounded, and not shares: the sum is that of the positions."""
        return np.diff([(block * _BLOCK * border) // _WHOLE for border in self._borders])


def _borders(weights: Mapping[str, float]) -> list[int]:
    """Return where each source's part of the whole begins, and where the last one ends.

    A source has a share of one in a block at least: else rounding could let it come less than 0 times in a block.
    """
    for name, weight in weights.items():
        if not 0 < weight < np.inf:
            raise _refused(name, weight, "a number above 0", f"data.sources.{name}=null leaves it out")
    total = sum(weights.values())
    borders = [0, *(round(_WHOLE * part / total) for part in accumulate(weights.values()))]
    for (name, weight), low, high in zip(weights.items(), borders[:-1], borders[1:], strict=True):
        if (high - low) * _BLOCK < _WHOLE:
            raise _refused(name, weight, f"a share of 1 in {_BLOCK:,} at least", f"a larger weight; data.sources.{name}=null leaves it out")
    return borders


def _refused(name: str, weight: float, expected: str, fix: str) -> ConfigError:
    return ConfigError(key=f"data.sources.{name}.weight", happened=f"is {weight}", expected=expected, fix=fix)
