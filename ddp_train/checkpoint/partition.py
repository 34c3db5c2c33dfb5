"""Who writes what: the large tensors that all ranks have, laid end to end and cut into one stretch of bytes for each rank.

A tensor that a share ends in is written in pieces. Of one that a strategy has cut among the ranks each writes the rows that it has, and of
rows that several have, each a part: nothing is gathered. Every rank, and every reader, computes the same from the tensors' names, types
and shapes. What nothing holds alike on all ranks, rank 0 writes alone: the shares of two states would make a third that no rank ever had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ddp_train.checkpoint.codec import Leaf, StateError
from ddp_train.interfaces import range_of

_ALIGNMENT = 16  # bytes; a multiple of every type's size, so that no number is cut


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of one tensor, counted in its logical order."""

    leaf: Leaf
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.leaf.numel

    @property
    def name(self) -> str:
        """Its name in the rank's file."""
        return self.leaf.name if self.is_whole else f"{self.leaf.name}[{self.start}:{self.stop}]"

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape if self.is_whole else (self.stop - self.start,)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


def divide(leaves: Iterable[Leaf], size: int, *, is_alike: Callable[[Leaf], bool] = lambda leaf: True) -> list[list[Piece]]:
    """Return the pieces of each of `size` ranks, about as many bytes for each; those of large types first, so that all are aligned.

    Args:
        is_alike: tells of a tensor whether all ranks have the same; rank 0 gets the others.
    """
    leaves = list(leaves)
    ordered = sorted(filter(is_alike, leaves), key=lambda leaf: -leaf.dtype.itemsize)
    total = sum(leaf.num_bytes for leaf in ordered)
    ends = [-(-total * (rank + 1) // size // _ALIGNMENT) * _ALIGNMENT for rank in range(size)]
    shares: list[list[Piece]] = [[] for _ in range(size)]
    shares[0] += whole(leaf for leaf in leaves if not (is_alike(leaf) and leaf.numel))
    position = rank = 0
    for leaf in ordered:
        start = 0
        while start < leaf.numel:
            while position == ends[rank]:
                rank += 1
            stop = min(leaf.numel, start + (ends[rank] - position) // leaf.dtype.itemsize)
            shares[rank].append(Piece(leaf, start, stop))
            position += (stop - start) * leaf.dtype.itemsize
            start = stop
    return shares


def pieces_between(leaf: Leaf, begin: int, end: int, size: int) -> Iterator[tuple[int, Piece]]:
    """Yield who of `size` ranks has written a tensor that was cut among them, and what, as far as it has elements from `begin` to `end`.

    Ranks are laid out as replicas of all shards: of R x S ranks the number r * S + s has shard s, and of it the part r of R.

    Raises:
        StateError: so many ranks cannot have had so many shards.
    """
    if size % leaf.shards:
        raise StateError(happened=f"{leaf.name} would be in {leaf.shards} shards on {size} ranks", expected="shards that divide the ranks")
    replicas, shards = size // leaf.shards, leaf.shards
    if begin >= end:
        return
    of_each = range_of(leaf.shape, shards, 0)[1]
    for shard in range(begin // of_each, min(shards, -(-end // of_each))):
        low, high = range_of(leaf.shape, shards, shard)
        for replica in range(replicas):
            start, stop = (low + (high - low) * number // replicas for number in (replica, replica + 1))
            if start < min(stop, end) and stop > begin:
                yield replica * shards + shard, Piece(leaf, start, stop)


def own_piece(leaf: Leaf, rank: int, size: int) -> list[Piece]:
    """Return what one of `size` ranks writes of a tensor that is cut among them: one piece, or none."""
    low, high = range_of(leaf.shape, leaf.shards, rank % leaf.shards)
    return [piece for writer, piece in pieces_between(leaf, low, high, size) if writer == rank]


def whole(leaves: Iterable[Leaf]) -> list[Piece]:
    """Return each tensor in one piece: a rank's own."""
    return [Piece(leaf, 0, leaf.numel) for leaf in leaves]
