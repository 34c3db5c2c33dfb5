"""One keyed hash: random bits that are a function of what they are for. And by what files are known again.

Of a file that is its size, its first and its last bytes. Never its times: a copy has others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
"""64 uniform random bits per sample, shape [B]."""

Values = NDArray[Any]
"""Unsigned integers of 32 or 64 bits."""

_BYTES = 1 << 16  # of a file, that are read at each end

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: SplitMix64's step."""


def random_bits(keys: Keys, draw: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits for each key; different draws of a key are independent. `keys` and `draw` broadcast.

    Distinct keys give distinct bits in one draw, since every line is a bijection.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64); constants of Stafford's Mix13.
    """
    offset = (np.asarray(draw, np.uint64) + np.asarray([1], np.uint64)) * GOLDEN  # arrays wrap silently, scalars would warn
    return mix(np.asarray(keys + offset))


def mix(values: Values) -> Values:
    """Hash 64-bit values. Source: splitmix64's finaliser (Steele, Lea & Flood 2014)."""
    hashed = values >> np.uint64(30)  # one array, changed in place: half of the time goes into memory else
    hashed ^= values
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    hashed ^= hashed >> np.uint64(27)
    hashed *= np.uint64(0x94D049BB133111EB)
    hashed ^= hashed >> np.uint64(31)
    return hashed


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
