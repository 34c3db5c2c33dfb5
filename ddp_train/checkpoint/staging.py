"""A rank's copy of its share of a checkpoint, laid out as in its file, in memory that the next save uses again."""

import ctypes
import json
import logging
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
import xxhash
from torch import Tensor

from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.codec import Leaf
from ddp_train.checkpoint.layout import OF_RANK_0, OWN, SHARED, WRITTEN_IN_SHARES, Piece, divide_shared, own_piece, whole_pieces
from ddp_train.interfaces.strategy import local_range, local_rows

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 16  # and a 64th: a state may grow from save to save, and new pinned memory takes seconds

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process, as torch registers its own


@dataclass(frozen=True)
class StagedShare:
    """The content of one rank's file: a header, and the values behind it."""

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

    def broken_tensor(self, may_be_infinite: Callable[[str], bool]) -> str | None:
        """Return the name of a tensor of the shared state that has NaN, or infinity where it may not; None: all are good."""
        for piece, values in self.copies:
            name = piece.leaf.name
            if name.startswith(f"{SHARED}.") and values.numel() and (piece.dtype.is_floating_point or piece.dtype.is_complex):
                lowest, highest = _range(values)
                if highest.isnan() or not (may_be_infinite(name.removeprefix(f"{SHARED}.")) or (lowest.isfinite() and highest.isfinite())):
                    return name.removeprefix(f"{SHARED}.")
        return None


class StagingBuffer:
    """Takes copies of a state, each over the one before. For a GPU the memory is pinned, and copied to on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if self._is_pinned else None
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
        pieces = divide_shared(leaves, size, written_in_shares=shared.get(WRITTEN_IN_SHARES, ()))[rank]
        pieces += [piece for leaf in leaves if leaf.shards > 1 for piece in own_piece(leaf, rank, size)]
        pieces += whole_pieces(codec.leaf_of(*item) for item in own_tensors.items())
        plain = {OWN: own_plain} | ({SHARED: shared_plain} if rank == 0 else {})
        texts = {name: torch.frombuffer(bytearray(json.dumps(part).encode()), dtype=torch.uint8) for name, part in plain.items()}
        pieces += whole_pieces(codec.leaf_of(*item) for item in texts.items())
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
        values = self._memory[: sum(piece.num_bytes for piece in pieces)]
        on_all_ranks = [leaf for leaf in leaves if _part(leaf) not in shared.get(OF_RANK_0, ())]
        return StagedShare(header, values, copies, on_all_ranks)

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
        self._memory = _allocate(num_bytes + num_bytes // 64 + _SPARE_BYTES, pinned=self._is_pinned)


def _part(leaf: Leaf) -> str:
    return leaf.name.split(".")[1]


def _copy(tensors: Mapping[str, Tensor], copies: Iterable[tuple[Piece, Tensor]]) -> None:
    for piece, values in copies:
        source = tensors[piece.leaf.name]
        rows = local_rows(source)
        first, _ = local_range(source)
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
