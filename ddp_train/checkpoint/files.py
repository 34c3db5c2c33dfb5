"""The files of a checkpoint, which others may have made: their names, and opening them. Imports no torch.

Nothing leads out of the folder: names without a path, plain files, no links.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_train.errors import UserError

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")


class CheckpointError(UserError):
    """A checkpoint is damaged, foreign or incomplete."""


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise CheckpointError(happened=f"{name!r} is no name of a file in a checkpoint")


@contextmanager
def opened(checkpoint: Path, name: str) -> Iterator[int]:
    """Open one file of a checkpoint for reading. Raises CheckpointError: it is missing or not a plain file."""
    with opened_folder(checkpoint) as folder, opened_file(folder, name) as descriptor:
        yield descriptor


@contextmanager
def opened_folder(checkpoint: Path) -> Iterator[int]:
    """Open the folder itself; a link to one is refused."""
    try:
        descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(happened=f"{checkpoint.name} is not a folder that can be read ({error.strerror})") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_file(folder: int, name: str) -> Iterator[int]:
    """Open one file of an open folder for reading."""
    require_name(name)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # non-blocking: it could be a pipe
    except FileNotFoundError:
        raise CheckpointError(happened=f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(happened=f"{name} cannot be opened ({error.strerror}; links are not followed)") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(happened=f"{name} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)
