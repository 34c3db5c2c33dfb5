"""Whether code draws from a global generator is seen, and no other code notices that it drew."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.loader import global_generators
from ddp_train.loader.global_generators import GENERATORS, Watched, seeded
from ddp_train.training.seeding import seed_all

DRAWS: dict[str, tuple[int, Callable[[], Any]]] = {
    "random": (0, random.random),
    "a normal number": (0, random.gauss),
    "one bit": (0, lambda: random.getrandbits(1)),
    "a whole turn of the twister": (0, lambda: random.getrandbits(32 * 624)),
    "a shuffle": (0, lambda: random.shuffle([1, 2, 3])),
    "numpy": (1, np.random.rand),
    "a normal number of numpy": (1, np.random.standard_normal),
    "bytes of numpy, a whole turn": (1, lambda: np.random.bytes(4 * 624)),
    "an empty-handed permutation": (1, lambda: np.random.permutation(3)),
    "torch": (2, lambda: torch.rand(1)),
    "a normal number of torch": (2, lambda: torch.randn(1)),
    "a permutation of torch": (2, lambda: torch.randperm(3)),
    "a whole turn of torch": (2, lambda: torch.rand(624)),
}


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    with seeded(0):
        seed_all(7)
        yield


@pytest.fixture(params=["memory", "states"])
def generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[global_generators.GlobalGenerator, ...]:
    """The generators as they are looked at here, and as where their memory is laid out in another way."""
    if request.param == "states":
        # Of this module alone: pytest's own messages are packed by the same function.
        monkeypatch.setattr(global_generators, "struct", SimpleNamespace(**{**vars(struct), "pack": lambda *_: b"another layout"}))
        monkeypatch.setattr(GENERATORS[0], "_look", global_generators._look_at_python())
        monkeypatch.setattr(GENERATORS[1], "_look", global_generators._look_at_numpy())
    for generator in GENERATORS:
        monkeypatch.setattr(generator, "_last", (None, None))
    return GENERATORS


@pytest.mark.parametrize(("place", "draw"), DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen_and_can_be_taken_back(generators: Any, place: int, draw: Callable[[], Any]) -> None:
    for _ in range(20):  # the first one turns the twister
        before = [generator.state() for generator in generators]
        assert not any(each.has_moved(state) for each, state in zip(generators, before, strict=True))
        drawn = draw()
        assert [each.has_moved(state) for each, state in zip(generators, before, strict=True)] == [n == place for n in range(3)]
        generators[place].put_back(before[place])
        assert not generators[place].has_moved(before[place])
        again = draw()
        assert torch.equal(again, drawn) if isinstance(drawn, torch.Tensor) else np.array_equal(again, drawn)


def test_a_normal_number_that_is_left_over_is_state(generators: Any) -> None:
    """Generators make normal numbers two at a time: the second one is drawn without a step of the twister."""
    for place, draw in ((0, random.gauss), (1, np.random.standard_normal)):
        draw()
        before = generators[place].state()
        second = draw()
        assert generators[place].has_moved(before)
        generators[place].put_back(before)
        assert draw() == second


def test_the_memory_of_this_interpreter_and_this_numpy_is_read() -> None:
    """Else it costs 100 us a batch: a new version lays its generators out in another way."""
    assert [type(generator.state()[0]) for generator in GENERATORS] == [tuple, tuple, bytes]


def test_numpy_with_another_generator_is_seen_to_draw() -> None:
    own = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(0))
        before = GENERATORS[1].state()
        assert not GENERATORS[1].has_moved(before)
        first = np.random.random()
        assert GENERATORS[1].has_moved(before)
        GENERATORS[1].put_back(before)
        assert np.random.random() == first
    finally:
        np.random.mtrand.set_bit_generator(own)


def test_what_draws_nothing_runs_once_and_is_given_nothing_to_seed() -> None:
    watched, given = Watched(), []
    for _ in range(3):
        assert watched.run(lambda drawn: given.append(list(drawn))) is None
    assert given == [[], [], []]


@pytest.mark.parametrize(("place", "draw"), DRAWS.values(), ids=DRAWS)
def test_what_draws_seeds_what_it_draws_from_and_leaves_no_trace(place: int, draw: Callable[[], Any]) -> None:
    watched, runs = Watched(), 0

    def make(drawn: Any) -> Any:
        nonlocal runs
        runs += 1
        for generator in drawn:
            generator.seed(11)
        return draw()

    before = [generator.state() for generator in GENERATORS]
    first = watched.run(make)
    draw()  # of the process itself, between two runs
    assert np.array_equal(np.asarray(watched.run(make)), np.asarray(first))
    assert runs == 3  # once too often, to find out
    assert watched._drawn == ((2,) if place == 2 else (place, 2))
    GENERATORS[place].put_back(before[place])
    watched.run(make)
    assert not any(each.has_moved(state) for each, state in zip(GENERATORS, before, strict=True))


def test_what_draws_from_one_and_later_from_another_is_seeded_for_both() -> None:
    """Whatever is found when: the numbers are the same as for one who knew from the start."""
    watched, numbers = Watched(), []
    for call in range(4):

        def make(drawn: Any, call: int = call) -> list[float]:
            for generator in drawn:
                generator.seed(call)
            return [random.random()] + [np.random.random()] * (call > 1)

        random.random()
        np.random.random()
        numbers.append((watched.run(make), Watched().run(make)))
    assert all(found == alone for found, alone in numbers)
    assert len(numbers[2][0]) == 2


def test_an_error_leaves_no_trace_either() -> None:
    def make(drawn: Any) -> None:
        random.random()
        torch.rand(3)
        raise ValueError("no")

    before = [generator.state() for generator in GENERATORS]
    with pytest.raises(ValueError, match="no"):
        Watched().run(make)
    with pytest.raises(ValueError, match="no"), seeded(3):
        make(())
    assert not any(each.has_moved(state) for each, state in zip(GENERATORS, before, strict=True))
