"""A checkpoint begins to exist: manifest and mark, everything on disk, one rename. On rank 0.

Knows files by their names alone, so that any writer can use it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddp_train.checkpoint.verify import COMPLETE, FORMAT, MANIFEST


def make_partial(partial: Path) -> None:
    """Make the folder that files are written to. Nobody else may have it.

    Raises:
        OSError: it cannot be made.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    os.mkdir(partial, 0o750)


def publish(partial: Path, final: Path, *, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Turn the folder into a checkpoint. Its files are on disk already.

    Args:
        facts: for the manifest: step, world_size, config_sha256 and what else there is to say.
        files: bytes and xxh3_128 of each file.

    Raises:
        OSError: it could not be made durable, and is no checkpoint.
    """
    manifest = {"format": FORMAT, **facts, "torch": torch.__version__, "files": files}
    text = json.dumps(manifest, indent=2) + "\n"
    _write(partial / MANIFEST, text)
    _write(partial / COMPLETE, hashlib.sha256(text.encode()).hexdigest() + "\n")
    for path in (partial / MANIFEST, partial / COMPLETE, partial):  # after all is written: most file systems then wait for the disk once
        _sync(path)
    if os.path.lexists(final):  # a rename would replace an empty folder
        raise FileExistsError(f"{final.name} is there already")
    os.rename(partial, final)
    try:
        _sync(final.parent)
    except OSError:
        with suppress(OSError):
            os.rename(final, partial)  # what may be gone after a power cut does not count
        raise


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    try:
        content = memoryview(text.encode())
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Let a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
