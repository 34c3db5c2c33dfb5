"""The tensors of a file that `torch.save` wrote, whatever else is in it: a .ckpt of Lightning's holds callbacks and classes of others.

No name in it is imported and nothing is called: what a pickle names is a tensor by its description, a dict, or a `_Husk`, which takes
whatever is done to it and keeps nothing. The values come from the archive only after their description was found to fit them.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoint.codec import DTYPES

_DATA = "data.pkl"
_PICKLE_BYTES = 256 << 20  # of the description, without the values
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Bool": torch.bool,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}


class InertPickleError(Exception):
    """The file is not what torch.save writes."""


def read_dict(path: Path, nested: Sequence[str]) -> dict[Any, Any]:
    """Return the dict that a file holds, or the one below the first of these names that there is; its tensors are on the CPU.

    What else is in it is None. Values that nobody asked for (an optimizer's) are not read.

    Raises:
        InertPickleError: it cannot be read.
        OSError: likewise.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            folder = next((name[: -len(_DATA)] for name in archive.namelist() if name.endswith(f"/{_DATA}")), None)
            if folder is None or archive.getinfo(f"{folder}{_DATA}").file_size > _PICKLE_BYTES:
                raise InertPickleError(f"has no {_DATA} that can be read")
            if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder").strip() != b"little":
                raise InertPickleError("was written on a machine of another byte order")
            content = _Unpickler(io.BytesIO(archive.read(f"{folder}{_DATA}"))).load()
            inner = (content.get(name) for name in nested) if isinstance(content, dict) else ()
            found = next((each for each in inner if isinstance(each, dict)), content)
            if not isinstance(found, dict):
                raise InertPickleError("holds no dict")
            values = _Values(archive, folder)
            return {name: values.tensor(value) if isinstance(value, _Described) else None for name, value in found.items()}
    except (InertPickleError, OSError):
        raise
    except Exception as error:  # whatever a file that was made to deceive may lead to
        raise InertPickleError(f"is damaged: {type(error).__name__}") from None


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


class _Husk:
    """Stands for an object of any class, and for the class."""

    def __new__(cls, *args: object, **kwargs: object) -> _Husk:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> _Husk:
        return _Husk()

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        """Take an item of what was a list."""

    def extend(self, items: object) -> None:
        """Take items of what was a list."""

    def add(self, item: object) -> None:
        """Take an item of what was a set."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name; nothing is imported."""
        if module in ("torch", "torch.storage"):
            if name in _STORAGES:
                return _Storage("", _STORAGES[name])
            if name == "UntypedStorage":
                return _Storage("", None)
            if name in DTYPES:
                return DTYPES[name]
        known = _KNOWN.get((module, name))
        return known if known is not None else type("Husk", (_Husk,), {})  # of its own: a pickle may set what belongs to it

    def persistent_load(self, saved_id: Any) -> Any:
        """Return the storage that a pickle refers to."""
        kind, storage, key, *_ = saved_id
        if kind != "storage" or not isinstance(storage, _Storage) or not str(key).isdigit():
            raise pickle.UnpicklingError("it refers to no storage")
        return _Storage(str(key), storage.dtype)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: object) -> _Described:
    return _Described(storage, storage.dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _typed_tensor(storage: Any, offset: Any, shape: Any, stride: Any, _grad: object, _hooks: object, dtype: Any, *_: object) -> _Described:
    return _Described(storage, dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _first(value: Any, *_: object) -> Any:
    return value


_KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda make, kind, args, state: make(*args) if make is _tensor else None,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Values:
    """Makes tensors of their descriptions. Those that share a storage share their memory."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        self._archive, self._folder = archive, folder
        self._storages: dict[str, Tensor] = {}

    def tensor(self, described: _Described) -> Tensor:
        """Return a tensor, after checking that it lies within its values."""
        shape, stride, dtype, offset = described.shape, described.stride, described.dtype, described.offset
        values = self._storage(described.storage.key).view(dtype)
        count = math.prod(shape)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if count else -1
        if min((offset, *shape, *stride), default=0) < 0 or last >= values.numel() or count > values.numel():
            raise InertPickleError("describes a tensor that does not fit its values")
        return values.as_strided(shape, stride, offset) if count else values.new_empty(shape)

    def _storage(self, key: str) -> Tensor:
        if key not in self._storages:
            content = bytearray(self._archive.read(f"{self._folder}data/{key}"))
            self._storages[key] = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return self._storages[key]
