"""The global random generators of python, numpy and torch (on the CPU), and code of others that may draw from them.

A data set's transforms draw from them, and so does the rest of the process (dropout). Such code is watched here: what it draws from is
seeded for it, and afterwards the generators are as they were. A state is compared by its bytes where these lie in memory: numpy takes
50 us to give its state and python 12, at every batch. The official functions give and set states; memory is read alone, never written.
"""

import ctypes
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import mtrand

_TWISTER = 4 * (624 + 1)  # bytes of a Mersenne twister: its words, and its position in them
_NORMAL = 0.8414709848078965e77  # in a generator's state it is this number and nothing else

Result = TypeVar("Result")

_numpy_state = partial(np.random.get_state, legacy=False)


class GlobalGenerator:
    """One global generator.

    Args:
        look: gives what differs between any two states.
        read: gives the state.
        write: sets the state.
        seed: lets it begin at a key of 64 bits.
    """

    def __init__(self, look: Callable[[], Any], read: Callable[[], Any], write: Callable[[Any], Any], seed: Callable[[int], Any]) -> None:
        self._look, self._read, self._write, self.seed = look, read, write, seed
        self._last: tuple[Any, Any] = None, None

    def state(self) -> tuple[Any, Any]:
        """Return the bytes by which its state is compared, and the state."""
        look = self._look()
        if self._last[0] != look:
            self._last = look, self._read()
        return self._last

    def has_moved(self, since: tuple[Any, Any]) -> bool:
        return bool(self._look() != since[0])

    def put_back(self, state: tuple[Any, Any]) -> None:
        if self.has_moved(state):
            self._write(state[1])


class Watched:
    """Runs code that may draw. It begins at seeds of its own where it draws, and the generators go on as if nothing had been drawn.

    Code that draws from no generator is run as it is. When it has drawn from one, it is run again: it has to seed that one from then on.
    """

    def __init__(self) -> None:
        self._drawn: tuple[int, ...] = ()  # places in GENERATORS; each process finds out for itself

    def run(self, make: Callable[[Sequence[GlobalGenerator]], Result]) -> Result:
        """Return the result of `make`, which gets the generators to seed before anything draws from them, and may be called again."""
        states, touched = [generator.state() for generator in GENERATORS], _ALL
        try:
            while True:
                result = make([GENERATORS[place] for place in self._drawn])
                new = [place for place in _ALL if place not in self._drawn and GENERATORS[place].has_moved(states[place])]
                if not new:
                    touched = self._drawn
                    return result
                # Torch's with any other: it tells its seed without a draw, and transforms seed others by that.
                self._drawn = tuple(sorted({*self._drawn, *new, _TORCH}))
        finally:
            for place in touched:
                GENERATORS[place].put_back(states[place])


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Let all of them begin at a key of 64 bits, and go on afterwards as if nothing had been drawn."""
    states = [generator.state() for generator in GENERATORS]
    for generator in GENERATORS:
        generator.seed(key)
    try:
        yield
    finally:
        for generator, state in zip(GENERATORS, states, strict=True):
            generator.put_back(state)


def _look_at_python() -> Callable[[], Any]:
    """The twister's position and words follow the head of the object; a normal number that is left over is an attribute."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
    known = random.Random(0)
    *words, position = known.getstate()[1]
    if _memory(id(known) + object.__basicsize__, _TWISTER)() != struct.pack("625I", position, *words):
        return lambda: pickle.dumps(random.getstate())
    twister = _memory(id(generator) + object.__basicsize__, _TWISTER)
    return lambda: (twister(), generator.gauss_next)  # type: ignore[attr-defined]


def _look_at_numpy() -> Callable[[], Any]:
    """numpy tells where the twister lies; a normal number that is left over is looked for in a generator that has a known one."""
    generator: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    bits: Any = mtrand.get_bit_generator()
    known = np.random.RandomState()
    known.set_state({**known.get_state(legacy=False), "has_gauss": 1, "gauss": _NORMAL})
    whole, left_over = _memory(id(known), type(known).__basicsize__)(), struct.pack("i4xd", 1, _NORMAL)
    if whole.count(left_over) != 1 or type(bits) is not np.random.MT19937 or type(generator) is not np.random.RandomState:
        return lambda: pickle.dumps(_numpy_state())
    twister, normal = _memory(bits.ctypes.state_address, _TWISTER), _memory(id(generator) + whole.find(left_over), len(left_over))

    def look() -> Any:
        if mtrand.get_bit_generator() is not bits:  # a user has given numpy another
            return pickle.dumps(_numpy_state())
        return twister(), normal()

    return look


def _memory(address: int, size: int) -> Callable[[], bytes]:
    """Return a function that reads the bytes at an address, of an object that lives as long as the process."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B").tobytes


# numpy and torch take halves of a key: both are the same twister, and with the same 32 bits they would draw the same.
# torch.manual_seed would seed the GPUs too, which have the model's dropout.
_torch = torch.default_generator
GENERATORS = (
    GlobalGenerator(_look_at_python(), random.getstate, random.setstate, random.seed),
    GlobalGenerator(_look_at_numpy(), _numpy_state, np.random.set_state, lambda key: np.random.seed(key & 0xFFFFFFFF)),
    GlobalGenerator(
        lambda: _torch.get_state().numpy().tobytes(), _torch.get_state, _torch.set_state, lambda key: _torch.manual_seed(key >> 32)
    ),
)
_ALL = tuple(range(len(GENERATORS)))
_TORCH = _ALL[-1]
