"""Weights of files of other programs: tensors and nothing else, checked before they are read, and never executed.

A refused file is not read in another way: there is no fall-back. `torch.save` writes a pickle and the values, and the pickle may hold
callbacks and classes of others, as a `.ckpt` of Lightning does: `_Unpickler` reads it, imports no name and calls nothing.
A name in the pickle becomes the description of a tensor, a dict, or an `_InertObject`. Values are read from the archive only after their
description was found to fit them.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.codec import DTYPES
from ddp_train.checkpoint.foreign_form import refuse, require_archive, require_regular
from ddp_train.errors import join_few

_NESTED = ("state_dict", "model", "model_state_dict")  # the last as in torch's tutorial
_DATA = "data.pkl"
_MAX_PICKLE_BYTES = 256 << 20  # the pickle describes the tensors; their values are apart
_TYPES = """Float:float32 Double:float64 Half:float16 BFloat16:bfloat16 Bool:bool Long:int64 Int:int32 Short:int16 Char:int8 Byte:uint8
ComplexFloat:complex64 ComplexDouble:complex128"""  # types of values, as pickles name them
_STORAGES = {f"{name}Storage": DTYPES[dtype] for name, _, dtype in (pair.partition(":") for pair in _TYPES.split())}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU. Raises UserError: it is no regular file, damaged, or made to deceive."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            return tensor_file.read(file.fileno(), str(path))
    except tensor_file.TensorFileError as error:
        refuse(path, error.happened.removeprefix(f"{path}: "))
    except OSError as error:
        refuse(path, error.strerror or str(error))


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote: of a dict of tensors, or of one below one of `_NESTED`.

    Everything else is neither imported nor made, and its values are not read. Raises UserError: it is no regular file, of an old
    format, damaged, has anything but tensors there, or is made to deceive.
    """
    require_archive(path)
    try:
        weights = _read_weights(path)
    except Exception as error:  # whatever a file that was made to deceive may lead to
        refuse(path, f"is damaged: {type(error).__name__}: {error}")
    if not isinstance(weights, dict) or not weights:
        refuse(path, f"holds a {type(weights).__name__}")
    if others := [str(name) for name, value in weights.items() if not isinstance(name, str) or not isinstance(value, Tensor)]:
        refuse(path, f"holds objects that are not tensors: {join_few(others)}")
    return weights


def _read_weights(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        folder = next((name[: -len(_DATA)] for name in archive.namelist() if name.endswith(f"/{_DATA}")), None)
        if folder is None or archive.getinfo(f"{folder}{_DATA}").file_size > _MAX_PICKLE_BYTES:
            raise pickle.UnpicklingError(f"it has no readable {_DATA}")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder").strip() != b"little":
            raise pickle.UnpicklingError("it was written in another byte order")
        content = _Unpickler(io.BytesIO(archive.read(f"{folder}{_DATA}"))).load()
        nested = [content.get(name) for name in _NESTED] if isinstance(content, dict) else []
        weights = next((value for value in nested if isinstance(value, dict)), content)
        if not isinstance(weights, dict):
            return weights
        storages: dict[str, Tensor] = {}  # those that share one share their memory
        return {name: value.read(archive, folder, storages) if isinstance(value, _Described) else None for name, value in weights.items()}


@dataclass(frozen=True)
class _Storage:
    """Values in the archive, as a pickle refers to them."""

    key: str
    dtype: torch.dtype | None  # None: bytes, whose type the tensor has


@dataclass(frozen=True)
class _Described:
    """A tensor as a pickle describes it."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, archive: zipfile.ZipFile, folder: str, storages: dict[str, Tensor]) -> Tensor:
        """Return the tensor, after checking that it lies within its values."""
        key = self.storage.key
        if key not in storages:
            content = bytearray(archive.read(f"{folder}data/{key}"))
            storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        values, count = storages[key].view(self.dtype), math.prod(self.shape)
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) if count else -1
        if min((self.offset, *self.shape, *self.stride), default=0) < 0 or last >= values.numel() or count > values.numel():
            raise pickle.UnpicklingError("it describes a tensor that does not fit its values")
        return values.as_strided(self.shape, self.stride, self.offset) if count else values.new_empty(self.shape)


class _InertObject:
    """Stands for an object of any class, and for the class: accepts every call and keeps nothing."""

    def _ignore(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _InertObject()

    __init__ = __setstate__ = __setitem__ = append = extend = add = _ignore


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a name; nothing is imported."""
        if module in ("torch", "torch.storage"):
            if name in _STORAGES or name == "UntypedStorage":
                return _Storage("", _STORAGES.get(name))
            if name in DTYPES:
                return DTYPES[name]
        return _KNOWN.get((module, name)) or type("InertObject", (_InertObject,), {})  # a new class: a pickle may set attributes

    def persistent_load(self, saved_id: Any) -> Any:
        kind, storage, key, *_ = saved_id
        if kind != "storage" or not isinstance(storage, _Storage) or not str(key).isdigit():
            raise pickle.UnpicklingError("it refers to no storage")
        return _Storage(str(key), storage.dtype)


def _describe(storage: Any, offset: Any, shape: Any, stride: Any, *arguments: Any) -> _Described:
    dtype = next((argument for argument in arguments if isinstance(argument, torch.dtype)), storage.dtype)  # _rebuild_tensor_v3 has one
    return _Described(storage, dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


_KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _describe,
    ("torch._utils", "_rebuild_tensor_v3"): _describe,
    ("torch._utils", "_rebuild_parameter"): lambda value, *others: value,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda value, *others: value,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda make, kind, args, state: make(*args) if make is _describe else None,
    ("collections", "OrderedDict"): OrderedDict,
}
