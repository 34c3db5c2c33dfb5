"""Reading: the ranks verify a checkpoint (`newest_good`, `damage_of`), and then read it into plain dicts.

Nothing in it is executed: tensors and JSON, by our own readers.
The shared state is read once, whatever the number of ranks: each rank reads some of the files and sends their tensors to the others. If a
tensor is sharded among the ranks, each rank reads its own rows from the files that have them. The shards may differ from those at the save.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_train.checkpoint import codec, manifest, tensor_file
from ddp_train.checkpoint.layout import OWN, SHARED, WRITTEN_IN_SHARES, Piece, divide_shared, pieces_between, whole_pieces
from ddp_train.checkpoint.manifest import CheckpointError, damage_found_by, opened, rank_file, read_manifest, require_origin
from ddp_train.distributed.world import World, alone
from ddp_train.interfaces.strategy import from_local_rows, local_range, local_rows
from ddp_train.run_folder.paths import step_folders

LayOut = Callable[[Mapping[str, Any], Mapping[str, codec.Leaf]], Mapping[str, Tensor]]
"""Gets the plain form of a state, and its leaves by name. Returns by name, for each tensor that is wanted in shards, a sharded tensor of
its shape."""

_T = TypeVar("_T")
_ROUND = 64 << 20  # bytes that a rank reads before it gives them to the others


def newest_good(folder: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> Path | None:
    """Return the newest checkpoint whose files match its manifest; rank 0 prints why it skips newer ones. Collective.

    Each rank reads some of the files (no world: this process reads them all), and meanwhile calls `on_progress`.
    """
    world = world or alone()
    for _, candidate in reversed(world.from_main(lambda: step_folders(folder))):
        damage = damage_of(candidate, world, on_progress=on_progress)
        if damage is None:
            return candidate
        world.print(f"checkpoint {candidate.name} is not used: {damage}")
    return None


def damage_of(checkpoint: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> str | None:
    """Compare every file with the manifest, and the manifest with its mark; return the damage, or None, the same on all ranks. Collective.

    Each rank reads some of the files (no world: this process reads them all), and calls `on_progress` every 8 MiB. Rank 0 alone reads the
    manifest and lists the folder: both are long for thousands of ranks; each rank gets the lines of its files.
    """
    world = world or alone()

    def shares() -> list[tuple[str | None, Mapping[str, manifest.FileEntry]]]:
        files: dict[str, manifest.FileEntry] = {}
        damage = damage_found_by(lambda: files.update(manifest.listed_files(checkpoint)))
        lines = list(files.items())
        return [(damage, dict(lines[rank :: world.size])) for rank in range(world.size)]

    damage, files_of_rank = world.each_from_main(shares)
    return damage or world.first_of(damage_found_by(lambda: manifest.compare_files(checkpoint, files_of_rank, on_progress)))


def read_shared(
    checkpoint: Path,
    world: World | None = None,
    *,
    only: Collection[str] | None = None,
    lay_out: LayOut = lambda plain, leaves: {},
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the state that all ranks have: model, model_versions, optimizer, scheduler, ... Whole tensors are on the CPU. Collective.

    Args:
        world: whose ranks each read some of the files; None: this process alone reads all of them.
        only: the parts to read, if they were saved; None: all.
        lay_out: tells which tensors are to be sharded among the ranks; none: all come whole, however they were written.
        on_progress: called again and again while this rank reads.

    Raises CheckpointError: it is not what its format says.
    """
    world = world or alone()
    size = size_of(checkpoint, world)
    with ExitStack() as stack:
        files = cache(partial(_File, checkpoint, stack))  # a file is opened when something in it is read first
        plain = world.from_main(lambda: files(0).plain(SHARED))
        shared = _Shared(plain, size, files)
        if isinstance(state := plain.get("state"), dict) and "step" in state:
            require_origin(checkpoint, "its state", step=state["step"])
        plain = plain if only is None else {part: value for part, value in plain.items() if part in only}
        leaves = codec.tensor_leaves(plain)
        likes = lay_out(plain, leaves)
        tensors = shared.read_together([leaf for name, leaf in leaves.items() if name not in likes], world, on_progress)
        for name, like in likes.items():
            rows = local_rows(like)
            tensors[name] = from_local_rows(shared.read(leaves[name], *local_range(like)).view(rows.shape).to(rows.device), like)
            on_progress()
        return _require(codec.decode(plain, tensors), dict)


class _Shared:
    """The shared state of a checkpoint that `size` ranks have written: its plain form, and the open files by rank."""

    def __init__(self, plain: Any, size: int, files: Callable[[int], _File]) -> None:
        self._size, self._files = size, files
        in_shares = _require(_require(plain, dict).get(WRITTEN_IN_SHARES, []), list)
        self._in_shares = defaultdict[str, list[tuple[int, Piece]]](list)  # by tensor: the rank whose file has a piece, and the piece
        for rank, share in enumerate(divide_shared(codec.tensor_leaves(plain).values(), size, written_in_shares=in_shares)):
            for piece in share:
                self._in_shares[piece.leaf.name].append((rank, piece))

    def read(self, leaf: codec.Leaf, begin: int, end: int) -> Tensor:
        """Return some elements of a tensor, [end - begin]."""
        values = torch.empty(end - begin, dtype=leaf.dtype)
        for rank, piece in self._pieces(leaf, begin, end):
            start, stop = max(begin, piece.start), min(end, piece.stop)
            if start < stop:
                self._files(rank).require(piece)
                target = values[start - begin : stop - begin].view(torch.uint8)
                self._files(rank).read(_Slice(rank, piece, (start - piece.start) * leaf.dtype.itemsize, target))
        return values

    def read_together(self, leaves: Iterable[codec.Leaf], world: World, on_progress: Callable[[], None]) -> dict[str, Tensor]:
        """Return whole tensors by their names: each rank reads some of the files, and sends them to the others. Collective."""
        leaves = list(leaves)
        by_reader: list[list[tuple[int, Piece]]] = [[] for _ in range(world.size)]
        for leaf in leaves:
            for rank, piece in self._pieces(leaf, 0, leaf.numel):
                by_reader[rank % world.size].append((rank, piece))
        for rank, piece in by_reader[world.rank]:
            self._files(rank).require(piece)
        tensors = {leaf.name: torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves}
        for by_rank in zip_longest(*(_rounds(pieces, tensors) for pieces in by_reader), fillvalue=list[_Slice]()):
            for wanted in by_rank[world.rank]:  # all ranks read at the same time
                self._files(wanted.rank).read(wanted)
                on_progress()
            for reader in range(world.size if world.size > 1 else 0):
                _send([wanted.target for wanted in by_rank[reader]], world, reader)
                on_progress()
        return tensors

    def _pieces(self, leaf: codec.Leaf, begin: int, end: int) -> Iterable[tuple[int, Piece]]:
        """Return the written pieces of a tensor that may have elements from `begin` to `end`, each with the rank of its file."""
        return self._in_shares[leaf.name] if leaf.shards == 1 else pieces_between(leaf, begin, end, self._size)


def size_of(checkpoint: Path, world: World) -> int:
    """Return the number of ranks that have written a verified checkpoint. Rank 0 alone reads its manifest. Collective."""
    return world.from_main(lambda: read_manifest(checkpoint).world_size)


def read_own(checkpoint: Path, rank: int) -> dict[str, Any]:
    """Return the state of one rank alone: random, window, loader. Raises CheckpointError: it is not what its format says."""
    with ExitStack() as stack:
        file = _File(checkpoint, stack, rank)
        plain = file.plain(OWN)
        tensors = {}
        for piece in whole_pieces(codec.tensor_leaves(plain).values()):
            file.require(piece)
            tensors[piece.name] = values = torch.empty(piece.shape, dtype=piece.dtype)
            file.read(_Slice(rank, piece, 0, values.view(-1).view(torch.uint8)))
        return _require(codec.decode(plain, tensors), dict)


class SavedPart:
    """One part of the shared state (`model`), open: its values by name. A tensor is in memory only after it was read.

    A part that was not saved is empty; the stack closes the files. Raises CheckpointError: it is not what its format says.
    """

    def __init__(self, checkpoint: Path, part: str, stack: ExitStack) -> None:
        files = cache(partial(_File, checkpoint, stack))
        plain = files(0).plain(SHARED)
        self._shared = _Shared(plain, read_manifest(checkpoint).world_size, files)
        self._plain: dict[str, Any] = _require(plain.get(part, {}), dict)
        is_tensor = {name: isinstance(value, dict) and "$tensor" in value for name, value in self._plain.items()}
        self.tensors = {name: leaf for name in self._plain if is_tensor[name] for leaf in codec.tensor_leaves(self._plain[name]).values()}
        self.other_names = [name for name in self._plain if not is_tensor[name]]

    def read(self, name: str) -> Tensor:
        """Return one tensor, contiguous, also if its memory was permuted."""
        leaf = self.tensors[name]
        values = self._shared.read(leaf, 0, leaf.numel).view(leaf.shape)
        tensor: Tensor = codec.decode(self._plain[name], {leaf.name: values})
        return tensor.contiguous()


@dataclass(frozen=True)
class _Slice:
    """Some bytes of a piece, which one read brings."""

    rank: int
    piece: Piece
    byte_offset: int  # from the piece's beginning
    target: Tensor  # uint8: the memory that they are read into


def _rounds(pieces: Iterable[tuple[int, Piece]], tensors: Mapping[str, Tensor]) -> Iterator[list[_Slice]]:
    """Cut the pieces that one rank reads into rounds, each sent to the others at once; with a piece comes the rank whose file has it."""
    slices: list[_Slice] = []
    room = _ROUND
    for rank, piece in pieces:
        target = tensors[piece.leaf.name].view(-1)[piece.start : piece.stop].view(torch.uint8)
        byte_offset = 0
        while byte_offset < piece.num_bytes:
            target_of_round = target[byte_offset : byte_offset + room]
            slices.append(_Slice(rank, piece, byte_offset, target_of_round))
            byte_offset += len(target_of_round)
            room -= len(target_of_round)
            if not room:
                yield slices
                slices, room = [], _ROUND
    if slices:
        yield slices


def _send(targets: Sequence[Tensor], world: World, reader: int) -> None:
    """Copy what one rank has read to all ranks, over the network of the device. Collective."""
    if not targets:
        return
    is_reader = world.rank == reader
    sizes = [target.numel() for target in targets]
    values = torch.cat(list(targets)).to(world.device) if is_reader else torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
    world.copy_from(reader, values)
    if not is_reader:
        for target, received in zip(targets, values.cpu().split(sizes), strict=True):
            target.copy_(received)


class _File:
    def __init__(self, checkpoint: Path, stack: ExitStack, rank: int) -> None:
        self._name = rank_file(rank)
        self._descriptor = stack.enter_context(opened(checkpoint, self._name))
        self._entries, origin = tensor_file.read_header(self._descriptor, self._name)
        if origin:  # which older programs did not write
            require_origin(checkpoint, self._name, step=origin.get("step"), run=origin.get("run"))

    def plain(self, name: str) -> Any:
        entry = self._entry(name)
        text = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        tensor_file.read_into(self._descriptor, entry.begin, text)
        try:
            return json.loads(text.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(happened=f"{self._name}: its {name!r} cannot be read ({error})") from None

    def require(self, piece: Piece) -> None:
        """Check that a piece is there, in the size that it must have, before memory is taken for it."""
        entry = self._entry(piece.name)
        if (size := entry.end - entry.begin) != piece.num_bytes:
            raise CheckpointError(happened=f"{self._name}: {piece.name} has {size:,} bytes instead of {piece.num_bytes:,}")

    def read(self, wanted: _Slice) -> None:
        tensor_file.read_into(self._descriptor, self._entry(wanted.piece.name).begin + wanted.byte_offset, wanted.target)

    def _entry(self, name: str) -> tensor_file.Entry:
        if name not in self._entries:
            raise CheckpointError(happened=f"{self._name}: {name} is missing")
        return self._entries[name]


def _require(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise CheckpointError(happened=f"a {type(value).__name__} was saved instead of a {kind.__name__}")
    return value
