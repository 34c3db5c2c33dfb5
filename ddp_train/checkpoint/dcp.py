"""Weights in the folders of torch.distributed.checkpoint (DCP), written and read one tensor at a time.

A folder of DCP has `.metadata`, a pickle that says which bytes of which file are of which tensor, and files in which each piece is as
`torch.save` writes it. To read the metadata is to unpickle it, which runs whatever it says: only for who trusts its writer. The pieces
are read as tensors alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoint.codec import Leaf
from ddp_train.errors import UserError

METADATA = ".metadata"
_MODEL = "model"
_FILE = "__0_0.distcp"


def write(folder: Path, leaves: Iterable[tuple[str, Leaf]], read: Callable[[str], Tensor]) -> int:
    """Write tensors into a new folder, below "model", and return their bytes. Each is in memory when it is written, and no other one.

    Args:
        leaves: the tensors by their names; those of one leaf are written once.
        read: returns the values of one.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    folder.mkdir(mode=0o750)
    described: dict[str, Any] = {}
    places: dict[str, Any] = {}  # of what is written, by the leaves' names
    results: list[WriteResult] = []
    with (folder / _FILE).open("xb") as file:
        for name, leaf in leaves:
            shape, origin = torch.Size(leaf.shape), torch.Size([0] * len(leaf.shape))
            if leaf.name not in places:
                start = file.tell()
                torch.save(read(name), file)
                places[leaf.name] = _StorageInfo(_FILE, start, file.tell() - start)
            key, place = f"{_MODEL}.{name}", places[leaf.name]
            described[key] = TensorStorageMetadata(TensorProperties(leaf.dtype), shape, [ChunkStorageMetadata(origin, shape)])
            results.append(WriteResult(index=MetadataIndex(key, origin, 0), size_in_bytes=place.length, storage_data=place))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    paths = {key: (_MODEL, key.removeprefix(f"{_MODEL}.")) for key in described}  # how torch puts the nested dict together again
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=described, planner_data=paths), [results])
    return size


class DcpFolder:
    """The tensors of a folder of DCP, of which no more than one is in memory. Unpickles the metadata, which can run code.

    Those below "model" are taken, by the names that they have there; all, where nothing is below it.

    Raises:
        UserError: it is none, damaged, or written in another way.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        try:
            self._metadata = FileSystemReader(folder).read_metadata()
            found = {key: each for key, each in self._metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
        except Exception as error:  # whatever unpickling raises
            raise UserError(happened=f"{folder / METADATA} cannot be read: {type(error).__name__}: {error}") from None
        prefix = f"{_MODEL}." if any(key.startswith(f"{_MODEL}.") for key in found) else ""
        self._keys = {key.removeprefix(prefix): key for key in found if key.startswith(prefix)}
        self.tensors = {name: (found[key].properties.dtype, tuple(found[key].size)) for name, key in self._keys.items()}
        self.num_others = len(self._metadata.state_dict_metadata) - len(self.tensors)

    def read(self, name: str) -> Tensor:
        """Return one tensor, put together from its pieces."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        key, (dtype, shape) = self._keys[name], self.tensors[name]
        values = torch.empty(shape, dtype=dtype)
        missing = values.numel()
        for chunk in self._metadata.state_dict_metadata[key].chunks:  # type: ignore[union-attr]
            place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            if getattr(place, "transform_descriptors", None):
                raise UserError(happened=f"{key} is written with {place.transform_descriptors}", expected="tensors as torch.save has them")
            with (self._folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                piece = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
            values[tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
            missing -= piece.numel()
        if missing:
            raise UserError(happened=f"{missing:,} numbers of {key} are in no file of {self._folder}")
        return values
