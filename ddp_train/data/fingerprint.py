"""By what files are known again: their size, their first and their last bytes. Never their times: a copy has others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import BinaryIO

import xxhash

_BYTES = 1 << 16  # that are read at each end


def fingerprint_of(file: BinaryIO) -> dict[str, int | str]:
    """Return what tells a file from another, and close it."""
    with file:
        first = file.read(_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _BYTES))
        return {"bytes": size, "first_bytes": xxhash.xxh3_64_hexdigest(first), "last_bytes": xxhash.xxh3_64_hexdigest(file.read())}


def hash_of(texts: Iterable[str]) -> str:
    """Return a short hash of texts, names of files say."""
    return xxhash.xxh3_64_hexdigest("\0".join(texts).encode("utf-8", "surrogateescape"))
