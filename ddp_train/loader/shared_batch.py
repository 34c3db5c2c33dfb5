"""A piece of memory that two processes share: one puts a batch in, the other takes it out.

Tensors are copied in and out, the rest of the batch travels as a pickle beside them. Nothing is allocated for each batch, and a batch that
was put in is there even if the process that put it in has ended since.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the slot."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + torch.Size(self.shape).numel() * self.dtype.itemsize


class SharedBatch:
    """Room for one batch, growing as needed.

    Args:
        descriptor: of the file in memory; None makes one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("batch") if descriptor is None else descriptor
        self._memory: mmap.mmap | None = None

    def put(self, batch: Any) -> bytes:
        text = io.BytesIO()
        pickler = _Packer(text)
        pickler.dump(batch)
        size = pickler.places[-1].end if pickler.places else 0
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)
        for tensor, place in zip(pickler.tensors, pickler.places, strict=True):
            self.view(place).copy_(tensor)
        return text.getvalue()

    def copy_out(self, text: bytes, *, pin_memory: bool) -> Any:
        """Copy the batch out.

        Args:
            pin_memory: into page-locked memory.
        """
        unpickler = _Unpacker(io.BytesIO(text))
        unpickler.slot, unpickler.pin_memory = self, pin_memory
        return unpickler.load()

    def close(self) -> None:
        self._memory = None
        os.close(self.descriptor)

    def view(self, place: _Place) -> Tensor:
        if place.end == place.offset:
            return torch.empty(place.shape, dtype=place.dtype)
        if self._memory is None or len(self._memory) < place.end:
            self._memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        numel = torch.Size(place.shape).numel()
        return torch.frombuffer(self._memory, dtype=place.dtype, count=numel, offset=place.offset).view(place.shape)


class _Packer(pickle.Pickler):
    """Leaves the tensors out, and notes where they will lie."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.places: list[_Place] = []

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.device.type != "cpu" or obj.is_quantized:
            return None  # pickled as it is
        offset = -(-self.places[-1].end // _ALIGNMENT) * _ALIGNMENT if self.places else 0
        self.tensors.append(obj.detach())
        self.places.append(_Place(offset, obj.dtype, tuple(obj.shape)))
        return self.places[-1]


class _Unpacker(pickle.Unpickler):
    slot: SharedBatch
    pin_memory: bool

    def persistent_load(self, pid: _Place) -> Tensor:
        return torch.empty(pid.shape, dtype=pid.dtype, pin_memory=self.pin_memory).copy_(self.slot.view(pid))
