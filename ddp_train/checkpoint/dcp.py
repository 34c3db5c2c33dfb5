"""Weights in the folders of torch.distributed.checkpoint (DCP), written and read one tensor at a time by torch's own functions.

A folder of DCP has `.metadata`, a pickle that says which bytes of which file are of which tensor, and files in which each piece is as
`torch.save` writes it. To read the metadata is to unpickle it, which runs whatever it says: only for who trusts its writer. torch reads
the pieces as tensors alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ddp_train.checkpoint.codec import Leaf
from ddp_train.errors import UserError

METADATA = ".metadata"
_MODEL = "model"


def write(folder: Path, leaves: Iterable[tuple[str, Leaf]], read: Callable[[str], Tensor]) -> int:
    """Write tensors into a new folder, below "model", and return the bytes of its files. Each is read when it is written.

    Args:
        leaves: the tensors by their names.
        read: returns the values of one.
    """
    folder.mkdir(mode=0o750)
    shapes = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for name, leaf in leaves}
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        save({_MODEL: shapes}, checkpoint_id=folder, planner=_ReadingPlanner(read), no_dist=True)
    return sum(path.stat().st_size for path in folder.iterdir())


class _ReadingPlanner(DefaultSavePlanner):
    """Plans by shapes and types, and reads a tensor when its turn comes."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(f"{_MODEL}."))


class DcpFolder:
    """The tensors of a folder of DCP, of which no more than one is in memory. Unpickles the metadata, which can run code.

    Those below "model" are taken, by the names that they have there; all, where nothing is below it.

    Raises:
        UserError: it is none, damaged, or has not all of a tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _CachingReader(folder)
        try:
            metadata = self._reader.read_metadata()
            described = {key: each for key, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
        except Exception as error:  # whatever unpickling raises
            raise UserError(happened=f"{folder / METADATA} cannot be read: {type(error).__name__}: {error}") from None
        for key, each in described.items():
            if missing := each.size.numel() - sum(math.prod(chunk.sizes) for chunk in each.chunks):
                raise UserError(happened=f"{missing:,} numbers of {key} are in no file of {folder}")
        prefix = f"{_MODEL}." if any(key.startswith(f"{_MODEL}.") for key in described) else ""
        self._keys = {key.removeprefix(prefix): key for key in described if key.startswith(prefix)}
        self.tensors = {name: (described[key].properties.dtype, tuple(described[key].size)) for name, key in self._keys.items()}
        self.num_others = len(metadata.state_dict_metadata) - len(self.tensors)

    def read(self, name: str) -> Tensor:
        """Return one tensor, put together from its pieces."""
        dtype, shape = self.tensors[name]
        state = {self._keys[name]: torch.empty(shape, dtype=dtype)}
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            load(state, storage_reader=self._reader, no_dist=True)
        return state[self._keys[name]]


class _CachingReader(FileSystemReader):
    """Unpickles the metadata once, and not for each tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata = self._metadata or super().read_metadata(*args, **kwargs)
        return self._metadata
