"""Weights of files that anybody may have written: tensors and nothing else, checked before they are read, and never executed.

A file that is refused is not read in another way: there is no fall-back.
"""

from __future__ import annotations

import pickle
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.inert_pickle import InertPickleError, read_dict
from ddp_train.errors import UserError

_ENTRIES = 1_000_000  # tensors in a .pt file
_ENTRY = re.compile(  # what torch.save writes: the structure, the tensors, and a few words about both
    r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
_NESTED = ("model", "state_dict", "model_state_dict")  # the last as in torch's tutorial


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        UserError: it is no regular file, damaged, or made to deceive.
    """
    _regular_size(path)
    try:
        with path.open("rb") as file:
            return tensor_file.read(file.fileno(), str(path))
    except tensor_file.TensorFileError as error:
        raise _refusal(error.happened) from None
    except OSError as error:
        _refuse(path, error.strerror or str(error))


def read_pt(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote: of a dict of tensors, or of one below one of `_NESTED`.

    Raises:
        UserError: it is no regular file, of an old format, damaged, holds anything but tensors, or is made to deceive.
    """
    _check_archive(path, _regular_size(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, MemoryError) as error:
        _refuse(path, f"holds more than tensors, or is damaged: {_cause(error)}")
    nested = [content.get(name) for name in _NESTED] if isinstance(content, Mapping) else []
    return _only_tensors(path, next((each for each in nested if isinstance(each, Mapping)), content))


def read_ckpt(path: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of Lightning's: the tensors below `state_dict`. What else it names is not imported.

    Raises:
        UserError: as `read_pt`; not for objects of other classes beside the weights.
    """
    _check_archive(path, _regular_size(path))
    try:
        return _only_tensors(path, read_dict(path, ("state_dict", "model")))
    except (InertPickleError, OSError) as error:
        _refuse(path, str(error))


def _only_tensors(path: Path, found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping) or not found:
        _refuse(path, f"holds a {type(found).__name__}")
    if others := [str(name) for name, value in found.items() if not isinstance(name, str) or not isinstance(value, Tensor)]:
        _refuse(path, f"holds other things than tensors: {', '.join(others[:8])}")
    return dict(found)


def _regular_size(path: Path) -> int:
    try:
        facts = path.stat()
    except OSError as error:
        _refuse(path, error.strerror or str(error))
    if not stat.S_ISREG(facts.st_mode):
        _refuse(path, "is not a regular file")
    return facts.st_size


def _check_archive(path: Path, num_bytes: int) -> None:
    """Refuse what `torch.save` does not write: other formats than its zip, compressed or overlapping entries, code."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError):
        _refuse(path, "is no file as torch has saved them since version 1.6: not a zip archive (tar and bare pickle files are not read)")
    if any("/code/" in entry.filename or entry.filename.endswith("/constants.pkl") for entry in entries):
        _refuse(path, "is a TorchScript archive, which holds code")
    if strange := [entry.filename for entry in entries if not _ENTRY.fullmatch(entry.filename)]:
        _refuse(path, f"has an entry {strange[0]!r}, which torch.save does not write")
    if len(entries) > _ENTRIES or len({entry.filename for entry in entries}) < len(entries):
        _refuse(path, "has the same entry twice, or too many of them")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(entry.file_size for entry in entries) > num_bytes:
        _refuse(
            path, f"would unpack to {sum(entry.file_size for entry in entries):,} bytes from {num_bytes:,}: torch.save compresses nothing"
        )


def _cause(error: Exception) -> str:
    """Return what torch objects to, without its advice to load the file unsafely."""
    found = re.search(r"(Unsupported[^\n]*?|Can only[^\n]*?|Trying to[^\n]*?)(?: was not | whose |$)", str(error), re.MULTILINE)
    return found[1] if found else type(error).__name__


def _refuse(path: Path, why: str) -> NoReturn:
    raise _refusal(f"{path}: {why}")


def _refusal(happened: str) -> UserError:
    return UserError(
        key="init_from",
        happened=happened,
        expected="a file of tensors alone, as safetensors or torch.save writes them",
        fix="save the weights as safetensors, where you trust the file: safetensors.torch.save_file(weights, FILE)",
    )
