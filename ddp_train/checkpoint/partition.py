"""Who writes what: the large tensors that all ranks have, laid end to end and cut into one stretch of bytes for each rank.

A tensor on a cut is written in pieces. Every rank, and every reader, computes the same from the tensors' names, types and shapes. What
nothing holds alike on all ranks, rank 0 writes alone: the shares of two states would make a third that no rank ever had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ddp_train.checkpoint.codec import Leaf

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


def whole(leaves: Iterable[Leaf]) -> list[Piece]:
    """Return each tensor in one piece: a rank's own."""
    return [Piece(leaf, 0, leaf.numel) for leaf in leaves]
