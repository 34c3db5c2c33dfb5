"""Which rank writes which bytes, and a rank's copy of them, in memory that is kept, laid out as its file will be.

The large tensors that all ranks have are laid end to end and cut into one stretch of bytes for each rank; a tensor across two stretches is
written in pieces. Of a tensor that a strategy has sharded among the ranks each rank writes its rows; of rows that several ranks have, each
writes a part: nothing is gathered. Every rank, and every reader, computes the same from the tensors' names, types and shapes. Tensors that
may differ between ranks are written by rank 0 alone: the shares of two states would make a third that no rank ever had.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
import xxhash
from torch import Tensor

from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.codec import Leaf, StateError
from ddp_train.interfaces import local_range, local_rows, shard_range

logger = logging.getLogger(__name__)

SHARED, OWN = "shared", "rank"
"""What all ranks have, and what is one rank's own: the roots of the tensors' names, and the names of the plain parts."""

_ALIGNMENT = 16  # bytes; a multiple of every type's size, so that no number is cut
_SLACK, _TEXTS = 64, 1 << 16
"""Room for a state that grows from save to save (numbers since the last record, say): new pinned memory takes seconds."""

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process, as torch registers its own

_ALIKE = ("model", "objective", "optimizer", "parameters_in_training", "strategy")
"""Parts whose tensors are the same on all ranks: the strategy keeps weights and optimizer state alike; the buffers are rank 0's."""

OF_RANK_0 = "of_rank_0"
"""The part of the shared state that lists parts which differ between ranks; rank 0 alone writes those."""


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


def divide_shared(leaves: Iterable[Leaf], size: int, *, of_rank_0: Collection[str] = ()) -> list[list[Piece]]:
    """Return which pieces of the shared state each of `size` ranks writes, but for tensors that are sharded among them (`pieces_between`).

    About as many bytes for each; tensors with large types first, so that all are aligned. Rank 0 gets the tensors that may differ between
    ranks, and the parts `of_rank_0`.
    """
    alike = tuple(f"{SHARED}.{part}." for part in _ALIKE if part not in of_rank_0)
    shares: list[list[Piece]] = [[] for _ in range(size)]
    ordered = list[Leaf]()
    for leaf in sorted((leaf for leaf in leaves if leaf.shards == 1), key=lambda leaf: -leaf.dtype.itemsize):
        if leaf.name.startswith(alike) and leaf.numel:
            ordered.append(leaf)
        else:
            shares[0] += whole([leaf])
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

    Ranks are laid out as replicas of all shards: of R x S ranks the number r * S + s has shard s, and of it the part r of R. Raises
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


def whole(leaves: Iterable[Leaf]) -> list[Piece]:
    """Return each tensor in one piece: a rank's own."""
    return [Piece(leaf, 0, leaf.numel) for leaf in leaves]


@dataclass(frozen=True)
class StagedShare:
    """What one rank writes: a header, and the values behind it."""

    header: bytes
    values: Tensor  # uint8, on the CPU
    copies: list[tuple[Piece, Tensor]]  # with each piece its view of `values`
    shared: list[Leaf]  # the tensors that all ranks must have, whichever rank writes them

    def layout(self) -> dict[str, str]:
        """Return a hash of the names, types and shapes in each part of the shared state, which decide how the ranks divide it."""
        digests: defaultdict[str, xxhash.xxh3_128] = defaultdict(xxhash.xxh3_128)
        for leaf in self.shared:
            digests[_part(leaf)].update(repr(leaf).encode())
        return {part: digest.hexdigest() for part, digest in digests.items()}

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.values.numel()

    def not_finite(self, may_be_infinite: Callable[[str], bool]) -> str:
        """Return the name of a tensor of the shared state that has NaN, or infinity where it may not; "": there is none."""
        for piece, values in self.copies:
            name = piece.leaf.name
            if name.startswith(f"{SHARED}.") and values.numel() and (piece.dtype.is_floating_point or piece.dtype.is_complex):
                lowest, highest = _range(values)
                if highest.isnan() or not (may_be_infinite(name.removeprefix(f"{SHARED}.")) or (lowest.isfinite() and highest.isfinite())):
                    return name.removeprefix(f"{SHARED}.")
        return ""


class StagingBuffer:
    """Takes copies of a state, each over the one before. For a GPU the memory is pinned, and copied to on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = device.type == "cuda"
        self._device, self._stream = device, torch.cuda.Stream(device) if self._is_pinned else None
        self._allocation: Thread | None = None

    def make_room(self, num_bytes: int) -> None:
        """Begin to allocate pinned memory for copies of about `num_bytes`, in a thread: some tenths of a second for each GB.

        Without this call the first save allocates it, and training waits.
        """
        if self._is_pinned:
            self._allocation = Thread(target=self._allocate, args=(num_bytes,), name="checkpoint memory", daemon=True)
            self._allocation.start()

    @torch.no_grad()
    def copy_state(self, shared: Mapping[str, Any], own: Mapping[str, Any], *, rank: int, size: int, origin: Any = None) -> StagedShare:
        """Copy this rank's share; later changes of the state do not change the copy. Waits for the device once.

        Args:
            shared: the same on every rank, or sharded among them; each copies its share.
            own: this rank's.
            origin: run and step of the checkpoint, for the file's header; None: the header has none.

        Raises StateError: a checkpoint cannot hold it.
        """
        shared_plain, tensors = codec.encode(shared, SHARED)
        own_plain, own_tensors = codec.encode(own, OWN)
        leaves = [codec.leaf_of(*item) for item in tensors.items()]
        of_rank_0 = shared.get(OF_RANK_0, ())
        pieces = divide_shared(leaves, size, of_rank_0=of_rank_0)[rank]
        pieces += [piece for leaf in leaves if leaf.shards > 1 for piece in own_piece(leaf, rank, size)]
        pieces += whole(codec.leaf_of(*item) for item in own_tensors.items())
        plain = {OWN: own_plain} | ({SHARED: shared_plain} if rank == 0 else {})
        texts = {name: torch.frombuffer(bytearray(json.dumps(part).encode()), dtype=torch.uint8) for name, part in plain.items()}
        pieces += whole(codec.leaf_of(*item) for item in texts.items())
        pieces.sort(key=lambda piece: -piece.dtype.itemsize)
        copies = list(self._views(pieces))
        tensors |= own_tensors | texts
        if self._stream is None:
            _copy(tensors, copies)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                _copy(tensors, copies)
            self._stream.synchronize()
        metadata = {tensor_file.ORIGIN: json.dumps(origin)} if origin else None
        header = tensor_file.make_header([(piece.name, piece.dtype, piece.shape) for piece in pieces], metadata)
        common = [leaf for leaf in leaves if _part(leaf) not in of_rank_0]
        return StagedShare(header, self._memory[: sum(piece.num_bytes for piece in pieces)], copies, common)

    def _views(self, pieces: list[Piece]) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with its view of the memory, which is allocated anew if it is too small."""
        total = sum(piece.num_bytes for piece in pieces)
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory is freed before the new one is allocated
            self._allocate(total)
        position = 0
        for piece in pieces:
            yield piece, self._memory[position : position + piece.num_bytes].view(piece.dtype).view(piece.shape)
            position += piece.num_bytes

    def _allocate(self, num_bytes: int) -> None:
        """Allocate memory for so many bytes and a little more, on any thread."""
        if self._is_pinned:
            torch.cuda.set_device(self._device)  # a new thread has the first GPU, and would open a context there
        self._memory = _allocate(num_bytes + num_bytes // _SLACK + _TEXTS, pinned=self._is_pinned)


def _part(leaf: Leaf) -> str:
    return leaf.name.split(".")[1]


def _copy(tensors: Mapping[str, Tensor], copies: Iterable[tuple[Piece, Tensor]]) -> None:
    for piece, values in copies:
        source = tensors[piece.leaf.name]
        rows, (first, _) = local_rows(source), local_range(source)
        values.copy_(rows if piece.is_whole else rows.reshape(-1)[piece.start - first : piece.stop - first], non_blocking=True)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value in one pass and without a copy; NaN when there is one."""
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    if values.dtype.itemsize == 1:  # float8 has no arithmetic
        values = values.to(torch.float32)
    lowest, highest = torch.aminmax(values)
    return lowest, highest


def _allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return memory on the CPU, uint8, shape [num_bytes]; pinned for a GPU, and then unpinned with the last tensor that uses it.

    torch's own pinned memory comes in powers of two: a share of 5 GB would take 8 GB, on each rank, for good. Here whole pages are mapped
    and registered with CUDA, which pins them.
    """
    if not pinned or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to pin
    owner = (ctypes.c_uint8 * size).from_buffer(memory)  # the tensor's; it ends before the pages do, which CUDA must give back first
    ctypes.memset(owner, 0, size)  # here other threads go on; within the call below they would wait for CUDA's lock
    values = torch.frombuffer(owner, dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(values.data_ptr(), size, _PORTABLE))
    if error:  # a limit on locked memory, say
        _forget_error()
        logger.warning("checkpoints are copied to %d MB of memory that is not pinned (CUDA error %d), more slowly", size >> 20, error)
    else:
        weakref.finalize(owner, _unpin, memory, values.data_ptr()).atexit = False  # CUDA may be gone before
    return values[:num_bytes]


def _unpin(memory: mmap.mmap, address: int) -> None:
    """Unregister pages from CUDA; `memory` is unmapped when this call ends."""
    if torch.cuda.cudart().cudaHostUnregister(address):
        _forget_error()


def _forget_error() -> None:
    """Clear CUDA's error, which the next kernel would report as its own."""
    with suppress(Exception):
        torch.zeros(1, device="cuda")
