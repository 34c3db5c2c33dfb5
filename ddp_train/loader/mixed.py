"""Which sample of a mixture comes when: each source as often as its weight says, in an order and with epochs of its own.

Positions are counted from the run's start and cut into blocks. How often a source comes in the first k blocks is its share of their
positions, rounded; at which places of a block is a keyed order. So the visit that a position is to its source needs no other block:
seeking costs nothing, and nothing depends on ranks, workers or restarts.
Shapes: S sources, n positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Indices, Sampler
from ddp_train.loader.sampler import hashes_of, key_of

_BLOCK = 1 << 12  # positions: long enough that a batch is drawn at random, short enough to be computed in a third of a millisecond
_WHOLE = 1 << 32  # what shares are parts of
_HELD = 16  # blocks
_PLACES, _SOURCE = 6, 7  # what a key is for; sampler.py has the others


class Mixed:
    """Draws from several sources by weight. An epoch is as many draws as they have samples together.

    A source's visits go through its sampler's epoch, then through the next one: with `Shuffled` each of its samples comes once before
    any comes again.

    Args:
        samplers: of each source, by its name; their indices count from 0.
        lengths: samples of each source. The mixture's indices have one source after another.
        weights: above 0, of any sum.
        multiple_of: the epoch's length is one, rounded down: where the last batch is left out, no visit is lost with it.

    Raises:
        ConfigError: a weight is not above 0, or its share is less than one of a block.
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
        """Return how many of the first `samples` samples of a run are of each source."""
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

    Raises:
        ConfigError: as for `Mixed`. With a share of one in a block at least, none comes less than 0 times in a block by rounding.
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


def source_seed(seed: int, number: int) -> int:
    """Return the seed of a source's own sampler."""
    return key_of(seed, number, _SOURCE)


def _refused(name: str, weight: float, expected: str, fix: str) -> ConfigError:
    return ConfigError(key=f"data.sources.{name}.weight", happened=f"is {weight}", expected=expected, fix=fix)
