"""Which rank writes which bytes of a checkpoint.

The large tensors that all ranks have are laid end to end and cut into one stretch of bytes for each rank; a tensor across two stretches is
written in pieces. Of a tensor that a strategy has sharded among the ranks each rank writes its rows; of rows that several ranks have, each
writes a stretch: nothing is gathered. Every rank, and every reader, computes the same from the tensors' names, types and shapes.

Rank 0 alone writes a part that is not listed as written in shares: shares of different states would make a state that no rank ever had.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from ddp_train.checkpoint.codec import Leaf, StateError
from ddp_train.interfaces.strategy import shard_range

SHARED, OWN = "shared", "rank"
"""What all ranks have, and what is one rank's own: the roots of the tensors' names, and the names of their plain forms."""
WRITTEN_IN_SHARES = "written_in_shares"  # lists the parts of the shared state whose tensors all ranks have: each writes a share
OF_RANK_0 = "of_rank_0"  # lists those of the other parts whose tensors may have other shapes on each rank

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
        """The key in the rank's file."""
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


def divide_shared(leaves: Iterable[Leaf], size: int, *, written_in_shares: Collection[str]) -> list[list[Piece]]:
    """Return the pieces of the shared state that each of `size` ranks writes, but for sharded tensors (`pieces_between`).

    Each rank gets about as many bytes. Tensors with large types come first, so that all are aligned. Rank 0 gets all of the parts that are
    not `written_in_shares`.
    """
    shared_out = tuple(f"{SHARED}.{part}." for part in written_in_shares)
    shares: list[list[Piece]] = [[] for _ in range(size)]
    ordered = list[Leaf]()
    for leaf in sorted((leaf for leaf in leaves if leaf.shards == 1), key=lambda leaf: -leaf.dtype.itemsize):
        if leaf.name.startswith(shared_out) and leaf.numel:
            ordered.append(leaf)
        else:
            shares[0] += whole_pieces([leaf])
    total = sum(leaf.num_bytes for leaf in ordered)
    ends = [-(-total * (rank + 1) // size // _ALIGNMENT) * _ALIGNMENT for rank in range(size)]
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
    """Yield the pieces of a sharded tensor that have elements from `begin` to `end`, each with the rank, of `size`, that has written it.

    Ranks are laid out as replicas of all shards: of R x S ranks the number r * S + s has shard s, and of it the stretch r of R. Raises
    StateError: so many ranks cannot have had so many shards.
    """
    if size % leaf.shards:
        raise StateError(happened=f"{leaf.name} would be in {leaf.shards} shards on {size} ranks", expected="shards that divide the ranks")
    replicas, shards = size // leaf.shards, leaf.shards
    if begin >= end:
        return
    shard_size = shard_range(leaf.shape, shards, 0)[1]
    for shard in range(begin // shard_size, min(shards, -(-end // shard_size))):
        low, high = shard_range(leaf.shape, shards, shard)
        for replica in range(replicas):
            start, stop = (low + (high - low) * number // replicas for number in (replica, replica + 1))
            if start < min(stop, end) and stop > begin:
                yield replica * shards + shard, Piece(leaf, start, stop)


def own_piece(leaf: Leaf, rank: int, size: int) -> list[Piece]:
    """Return the piece that one of `size` ranks writes of a tensor that is sharded among them, or none."""
    low, high = shard_range(leaf.shape, leaf.shards, rank % leaf.shards)
    return [piece for writer, piece in pieces_between(leaf, low, high, size) if writer == rank]


def whole_pieces(leaves: Iterable[Leaf]) -> list[Piece]:
    """Return each tensor in one piece, as one rank alone writes it."""
    return [Piece(leaf, 0, leaf.numel) for leaf in leaves]
