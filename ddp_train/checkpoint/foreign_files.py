"""Weights of files that anybody may have written: tensors and nothing else, checked before they are read, and never executed.

A file that is refused is not read in another way: there is no fall-back.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.foreign_form import refuse, require_archive, require_regular
from ddp_train.checkpoint.inert_pickle import InertPickleError, read_dict

_NESTED = ("model", "state_dict", "model_state_dict")  # the last as in torch's tutorial


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        UserError: it is no regular file, damaged, or made to deceive.
    """
    require_regular(path)
    try:
        with path.open("rb") as file:
            return tensor_file.read(file.fileno(), str(path))
    except tensor_file.TensorFileError as error:
        refuse(path, error.happened.removeprefix(f"{path}: "))
    except OSError as error:
        refuse(path, error.strerror or str(error))


def read_pt(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote: of a dict of tensors, or of one below one of `_NESTED`.

    Raises:
        UserError: it is no regular file, of an old format, damaged, holds anything but tensors, or is made to deceive.
    """
    require_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, MemoryError) as error:
        refuse(path, f"holds more than tensors, or is damaged: {_cause(error)}")
    nested = [content.get(name) for name in _NESTED] if isinstance(content, Mapping) else []
    return _only_tensors(path, next((each for each in nested if isinstance(each, Mapping)), content))


def read_ckpt(path: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of Lightning's: the tensors below `state_dict`. What else it names is not imported.

    Raises:
        UserError: as `read_pt`; not for objects of other classes beside the weights.
    """
    require_archive(path)
    try:
        return _only_tensors(path, read_dict(path, ("state_dict", "model")))
    except (InertPickleError, OSError) as error:
        refuse(path, str(error))


def _only_tensors(path: Path, found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping) or not found:
        refuse(path, f"holds a {type(found).__name__}")
    if others := [str(name) for name, value in found.items() if not isinstance(name, str) or not isinstance(value, Tensor)]:
        refuse(path, f"holds other things than tensors: {', '.join(others[:8])}")
    return dict(found)


def _cause(error: Exception) -> str:
    """Return what torch objects to, without its advice to load the file unsafely."""
    found = re.search(r"(Unsupported[^\n]*?|Can only[^\n]*?|Trying to[^\n]*?)(?: was not | whose |$)", str(error), re.MULTILINE)
    return found[1] if found else type(error).__name__
