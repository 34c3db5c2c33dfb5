"""One keyed hash: random bits that are a function of what they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
"""64 uniform random bits per sample, shape [B]."""

Values = NDArray[Any]
"""Unsigned integers of 32 or 64 bits."""

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
