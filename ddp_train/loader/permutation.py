"""Permutations that are computed instead of stored: O(1) memory, any position at once, whole arrays at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np

from ddp_train.hashing import GOLDEN, Values, mix
from ddp_train.interfaces import Indices

_ROUNDS = 6
_ROUNDS_OF_EACH = 20  # few elements need more rounds before all their orders are equally likely

Parameter = Any
"""An unsigned integer for all positions, or an array with one for each."""


class Permutation:
    """A bijection of 0..length-1, chosen by a key.

    A Feistel network whose halves are residues: with a x b >= length, each round adds a keyed hash of one half to the other, modulo
    a or b. Positions that leave the range walk on until they are inside (fewer than a of the a x b are outside).

    Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains" (generalised Feistel, cycle walking).
    """

    def __init__(self, length: int, key: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation needs at least one element, not {length}")
        self.length = length
        left = isqrt(length - 1) + 1
        word = np.uint32 if left <= 1 << 16 else np.uint64  # the narrower one is four times as fast
        self._left, self._right = word(left), word(-(-length // left))
        self._keys = list(np.random.SeedSequence(key).generate_state(_ROUNDS, word))

    def __call__(self, positions: Indices) -> Indices:
        """Return the elements at `positions`, shape [n] -> [n]."""
        return _walk(positions.astype(self._left.dtype), self.length, self._left, self._right, self._keys)


def permute_each(positions: Indices, lengths: Indices, keys: Values) -> Indices:
    """Return the element at `positions[i]` of the permutation of 0..lengths[i]-1 that `keys[i]` chooses; all of shape [n].

    As `Permutation`, for many short ones: all orders of a few elements are equally likely.
    """
    left = np.ceil(np.sqrt(lengths)).astype(np.int64)
    left += left % 2  # with two odd sides every round would be an even permutation, and so would the whole
    right = -(-lengths // left)
    round_keys = [mix(keys + GOLDEN * number) for number in np.arange(1, _ROUNDS_OF_EACH + 1, dtype=np.uint64)[:, None]]
    return _walk(positions.astype(np.uint64), lengths.astype(np.uint64), left.astype(np.uint64), right.astype(np.uint64), round_keys)


def _walk(values: Values, length: Parameter | int, left: Parameter, right: Parameter, keys: Sequence[Parameter]) -> Indices:
    found = _encipher(values, left, right, keys)
    outside = np.flatnonzero(found >= length)
    while outside.size:
        walked = _encipher(found[outside], _at(left, outside), _at(right, outside), [_at(key, outside) for key in keys])
        found[outside] = walked
        outside = outside[walked >= _at(length, outside)]
    return found.astype(np.int64)


def _encipher(values: Values, left_size: Parameter, right_size: Parameter, keys: Sequence[Parameter]) -> Values:
    below = _below_32 if values.dtype == np.uint32 else _below_64
    left = values // right_size
    right = values - left * right_size
    for number, key in enumerate(keys):
        half, other, size = (left, right, left_size) if number % 2 == 0 else (right, left, right_size)
        half += below(other ^ key, size)
        np.minimum(half, half - size, out=half)  # modulo size: what was below it has become huge
    found: Values = left * right_size + right
    return found


def _below_64(values: Values, size: Parameter) -> Values:
    """Hash values into [0, size), for sizes up to 2^32, by a multiply and a shift instead of a division."""
    hashes = mix(values)
    hashes >>= np.uint64(32)
    hashes *= size
    hashes >>= np.uint64(32)
    return hashes


def _below_32(values: Values, size: Parameter) -> Values:
    """Hash values into [0, size), for sizes up to 2^16. Source: `lowbias32` (Wellons 2018, public domain), without its ends."""
    values *= np.uint32(0x7FEB352D)  # in place: half of the time goes into memory else
    values ^= values >> np.uint32(15)
    values *= np.uint32(0x846CA68B)
    low = values & np.uint32(0xFFFF)  # a product of 48 bits, in two parts that fit
    low *= size
    low >>= np.uint32(16)
    values >>= np.uint32(16)
    values *= size
    values += low
    values >>= np.uint32(16)
    return values


def _at(parameter: Parameter, places: Indices) -> Parameter:
    return parameter[places] if isinstance(parameter, np.ndarray) else parameter
