"""The global random generators of python, numpy and torch (on the CPU), and code of others that may draw from them.

A data set's transforms draw from them, and so does the rest of the process (dropout). Such code is watched here: what it draws from is
seeded for it, and afterwards the generators are as they were.

To watch costs little. Two generators are compared by their bytes where these lie in memory, for numpy takes 50 us to give its state and
python makes 625 numbers of it; the state itself is asked for only when the bytes are others than last time. Where they lie is found in
another generator of the same type whose state is known. Where it cannot be found, the state itself is compared.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random import mtrand

_WORDS = 624  # of a Mersenne twister, 32 bits each
_NORMAL = 0.8414709848078965e77  # in a generator's state it is this number and nothing else

Made = TypeVar("Made")

Look = Callable[[], Any]
"""Gives what differs between any two states of a generator."""


class Snapshot(NamedTuple):
    """A generator's state, and what it looked like."""

    seen: Any
    state: Any


class Stream:
    """One global generator.

    Args:
        look: what differs between any two states.
        read: gives the state.
        write: takes it back.
        seed: lets it begin at a key of 64 bits.
    """

    def __init__(self, look: Look, read: Callable[[], Any], write: Callable[[Any], Any], seed: Callable[[int], Any]) -> None:
        self._look, self._read, self._write, self.seed = look, read, write, seed
        self._last: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Return its state."""
        seen = self._look()
        if self._last is None or self._last.seen != seen:
            self._last = Snapshot(seen, self._read())
        return self._last

    def has_moved(self, since: Snapshot) -> bool:
        """Tell whether it is in another state than then."""
        return bool(self._look() != since.seen)

    def put_back(self, snapshot: Snapshot) -> None:
        """Let it go on from a state."""
        self._write(snapshot.state)


class Watched:
    """Runs code that may draw. It begins at seeds of its own where it draws, and the generators go on as if nothing had been drawn.

    Code that draws from no generator is run as it is. When it has drawn from one, it is run again: it has to seed that one from then on.
    """

    def __init__(self) -> None:
        self._drawn: tuple[int, ...] = ()  # places in STREAMS; each process finds out for itself

    def run(self, make: Callable[[Sequence[Stream]], Made]) -> Made:
        """Return what `make` makes.

        Args:
            make: is given the generators that it has to seed before it draws from them, or lets others do so; may be called again.
        """
        before, touched = [stream.snapshot() for stream in STREAMS], _ALL
        try:
            while True:
                made = make([STREAMS[place] for place in self._drawn])
                found = tuple(place for place in _ALL if place not in self._drawn and STREAMS[place].has_moved(before[place]))
                if not found:
                    touched = self._drawn
                    return made
                # Torch's with any other: it tells its seed without a draw, and transforms seed others by that.
                self._drawn = tuple(place for place in _ALL if place in {*self._drawn, *found, _TORCH})
        finally:
            _put_back(before, touched)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Let all of them begin at a key of 64 bits, and go on afterwards as if nothing had been drawn."""
    before = [stream.snapshot() for stream in STREAMS]
    for stream in STREAMS:
        stream.seed(key)
    try:
        yield
    finally:
        _put_back(before, _ALL)


def _put_back(before: list[Snapshot], touched: tuple[int, ...]) -> None:
    for place in touched:
        if STREAMS[place].has_moved(before[place]):
            STREAMS[place].put_back(before[place])


def _look_at_python() -> Look:
    """The twister's position and words, in this order, and a normal number that is left over."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
    known = random.Random(0)
    *words, position = known.getstate()[1]
    place = _place_of(struct.pack(f"i{_WORDS}I", position, *words), known)
    if place is None or type(generator) is not random.Random:
        return lambda: pickle.dumps(random.getstate())
    twister = _memory(generator, place, 4 * (1 + _WORDS))
    return lambda: (twister.tobytes(), generator.gauss_next)  # type: ignore[attr-defined]


def _look_at_numpy() -> Look:
    """The twister's words and position, in this order; whether a normal number is left over, and which."""
    generator: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    twister = mtrand.get_bit_generator()
    known_twister = np.random.MT19937(0)
    state = known_twister.state["state"]
    place = _place_of(state["key"].tobytes() + struct.pack("i", state["pos"]), known_twister)
    known = np.random.RandomState(known_twister)
    known.set_state({**known.get_state(legacy=False), "has_gauss": 1, "gauss": _NORMAL})
    normal_place = _place_of(struct.pack("i4xd", 1, _NORMAL), known)
    if place is None or normal_place is None or type(twister) is not np.random.MT19937 or type(generator) is not np.random.RandomState:
        return lambda: pickle.dumps(np.random.get_state(legacy=False))
    words, normal = _memory(twister, place, 4 * (_WORDS + 1)), _memory(generator, normal_place, 16)

    def look() -> Any:
        if mtrand.get_bit_generator() is not twister:  # somebody has given numpy another
            return pickle.dumps(np.random.get_state(legacy=False))
        return words.tobytes(), normal.tobytes()

    return look


def _place_of(content: bytes, thing: Any) -> int | None:
    """Return where in a Python object some bytes lie; None: not there, or more than once."""
    memory = ctypes.string_at(id(thing), type(thing).__basicsize__)
    return memory.find(content) if memory.count(content) == 1 else None


def _memory(thing: Any, place: int, size: int) -> memoryview:
    """Return a part of a Python object that lives as long as the process."""
    return memoryview((ctypes.c_char * size).from_address(id(thing) + place)).cast("B")


# numpy and torch take halves of a key: both are the same twister, and with the same 32 bits they would draw the same.
# torch.manual_seed would seed the GPUs too, which have the model's dropout.
STREAMS = (
    Stream(_look_at_python(), random.getstate, random.setstate, random.seed),
    Stream(
        _look_at_numpy(),
        lambda: np.random.get_state(legacy=False),
        np.random.set_state,
        lambda key: np.random.seed(key & 0xFFFFFFFF),
    ),
    Stream(
        lambda: torch.default_generator.get_state().numpy().tobytes(),
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        lambda key: torch.default_generator.manual_seed(key >> 32),
    ),
)
_ALL = tuple(range(len(STREAMS)))
_TORCH = _ALL[-1]
