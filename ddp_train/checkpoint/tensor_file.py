"""A file of named tensors in the layout of safetensors: 8 bytes of length, a JSON header, and the values without gaps.

The writer hashes its buffer while it writes. The reader checks everything: that the header is small, that every type is known, and that
the values fill the file exactly once.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from ddp_train.checkpoint.manifest import CHUNK_BYTES
from ddp_train.errors import UserError

_NAMES = """BOOL:bool U8:uint8 I8:int8 U16:uint16 I16:int16 F16:float16 BF16:bfloat16 U32:uint32 I32:int32 F32:float32 U64:uint64 I64:int64
F64:float64 F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2"""
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in (pair.split(":") for pair in _NAMES.split())}
"""The types that the format has, by its names; others are written as bytes."""

_FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
ORIGIN = "origin"  # a key in the metadata of a rank's file: the run that saved it and the step, as JSON
_MAX_HEADER = 16 << 20  # bytes; 100,000 tensors take about 10 MB


class TensorFileError(UserError):
    """A file does not follow its format."""


@dataclass(frozen=True)
class Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the beginning of the file
    end: int


def make_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header for the values of tensors in this order, with `metadata` for other programs. Raises TensorFileError: too many."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        is_known = dtype in _FILE_DTYPES
        entries[name] = {
            "dtype": _FILE_DTYPES[dtype] if is_known else "U8",
            "shape": list(shape) if is_known else [size],
            "data_offsets": [begin, begin + size],
        }
        begin += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 16)  # so that the values lie as they do in memory
    if (size := len(text)) > _MAX_HEADER:
        raise TensorFileError(happened=f"{len(entries):,} tensors need a header of {size:,} bytes", expected=f"{_MAX_HEADER:,} at most")
    return len(text).to_bytes(8, "little") + text


def write(path: str | os.PathLike[str], contents: Iterable[memoryview], *, on_progress: Callable[[], None] = lambda: None) -> str:
    """Write a new file, on disk when this returns, and return its xxh3-128. Raises OSError: not all of it could be written.

    The contents follow each other: the header, and values, each made when it is written. `on_progress` is called after every 8 MiB.
    """
    digest = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    try:
        for content in contents:
            for start in range(0, len(content), CHUNK_BYTES):
                chunk = content[start : start + CHUNK_BYTES]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
                on_progress()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def read_header(descriptor: int, name: str) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the tensors of an open file by name, and its origin. Raises TensorFileError, with the file's `name`: the header is invalid."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(_MAX_HEADER, size - 8):
        raise TensorFileError(happened=f"{name}: its header would have {length:,} of {size:,} bytes", expected=f"{_MAX_HEADER:,} at most")
    try:
        header = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=_without_repeats)
        origin = json.loads((header.pop("__metadata__", None) or {}).get(ORIGIN, "{}"))
        entries = {key: _entry(value, 8 + length) for key, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(happened=f"{name}: its header cannot be read ({type(error).__name__}: {error})") from None
    position = 8 + length
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise TensorFileError(happened=f"{name}: the values of {key} are at a wrong position")
        position = entry.end
    if position != size:
        raise TensorFileError(happened=f"{name}: its tensors end at byte {position:,}, the file has {size:,}")
    return entries, origin if isinstance(origin, dict) else {}


def read_into(descriptor: int, position: int, values: Tensor) -> None:
    """Fill contiguous memory on the CPU from a position in the file. Raises TensorFileError: the file ends before."""
    target = values.view(-1).view(torch.uint8).numpy().data if values.numel() else b""
    while target:
        count = os.preadv(descriptor, [target[: 1 << 30]], position)
        if count == 0:
            raise TensorFileError(happened=f"the file ends at byte {position:,}, before its values do")
        target, position = target[count:], position + count


def read(descriptor: int, name: str) -> dict[str, Tensor]:
    """Return all tensors of an open file. Raises TensorFileError: it does not follow its format."""
    tensors = {}
    for key, entry in read_header(descriptor, name)[0].items():
        try:
            tensors[key] = torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError:  # its size is right by a zero, and the rest overflows
            raise TensorFileError(happened=f"{name}: {key} has a shape that no tensor can have") from None
        read_into(descriptor, entry.begin, tensors[key])
    return tensors


def _entry(value: Mapping[str, Any], start: int) -> Entry:
    shape, (begin, end) = value["shape"], value["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end)):
        raise ValueError("a size is no whole number")
    if value["dtype"] not in TORCH_DTYPES:
        raise ValueError(f"values of the type {value['dtype']!r} are not known")
    return Entry(TORCH_DTYPES[value["dtype"]], tuple(shape), start + begin, start + end)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name comes twice")
    return mapping
