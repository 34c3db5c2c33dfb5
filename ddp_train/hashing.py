"""Keyed hashes, permutations that are computed instead of stored, and fingerprints of files.

A fingerprint is a file's size, its first and its last bytes. Never its times: a copy has others.
"""

import os
from collections.abc import Iterable, Sequence
from math import isqrt
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

Keys = NDArray[np.uint64]  # 64 uniform random bits per sample, shape [B]
Values = NDArray[Any]  # unsigned integers of 32 or 64 bits
Elements = NDArray[np.int64]  # positions in a sequence, or elements of one, shape [n]
_BYTES = 1 << 16  # of a file, that are read at each end
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: SplitMix64's step


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
    """Return the identity of a file, and close it."""
    with file:
        first = file.read(_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _BYTES))
        return {"bytes": size, "first_bytes": xxhash.xxh3_64_hexdigest(first), "last_bytes": xxhash.xxh3_64_hexdigest(file.read())}


def hash_of(texts: Iterable[str]) -> str:
    """Return a short hash of texts, names of files say."""
    return xxhash.xxh3_64_hexdigest("\0".join(texts).encode("utf-8", "surrogateescape"))


_ROUNDS = 6
_ROUNDS_OF_EACH = 20  # few elements need more rounds before all their orders are equally likely
Parameter = Any  # an unsigned integer for all positions, or an array with one for each


class Permutation:
    """A bijection of 0..length-1, chosen by a key: O(1) memory, any position at once.

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

    def __call__(self, positions: Elements) -> Elements:
        """Return the elements at `positions`, shape [n] -> [n]."""
        return _walk(positions.astype(self._left.dtype), self.length, self._left, self._right, self._keys)


def permute_each(positions: Elements, lengths: Elements, keys: Values) -> Elements:
    """Return the element at `positions[i]` of the permutation of 0..lengths[i]-1 that `keys[i]` chooses; all of shape [n].

    As `Permutation`, for many short ones: all orders of a few elements are equally likely.
    """
    left = np.ceil(np.sqrt(lengths)).astype(np.int64)
    left += left % 2  # with two odd sides every round would be an even permutation, and so would the whole
    right = -(-lengths // left)
    round_keys = [mix(keys + GOLDEN * number) for number in np.arange(1, _ROUNDS_OF_EACH + 1, dtype=np.uint64)[:, None]]
    return _walk(positions.astype(np.uint64), lengths.astype(np.uint64), left.astype(np.uint64), right.astype(np.uint64), round_keys)


def _walk(values: Values, length: Parameter | int, left: Parameter, right: Parameter, keys: Sequence[Parameter]) -> Elements:
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


def _at(parameter: Parameter, places: Elements) -> Parameter:
    return parameter[places] if isinstance(parameter, np.ndarray) else parameter
