"""Draws from several sources by weight: exact shares, each source in its own epochs, and any position at once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ddp_train.errors import ConfigError
from ddp_train.loader.mixed import Mixed, source_seed
from ddp_train.loader.sampler import Shuffled

LENGTHS = {"large": 3000, "small": 70, "rare": 500}
WEIGHTS = {"large": 6.0, "small": 3.0, "rare": 0.1}
SHARES = np.asarray(list(WEIGHTS.values())) / sum(WEIGHTS.values())


def mixed(seed: int = 0, **changes: float) -> Mixed:
    samplers = {name: Shuffled(length, seed=source_seed(seed, number)) for number, (name, length) in enumerate(LENGTHS.items())}
    return Mixed(samplers, list(LENGTHS.values()), WEIGHTS | changes, seed=seed)


def drawn(sampler: Mixed, start: int, stop: int) -> np.ndarray:
    """Return the indices at positions of the run, whatever their epochs."""
    epochs, positions = np.divmod(np.arange(start, stop), sampler.length)
    return np.concatenate([sampler(int(epoch), positions[epochs == epoch]) for epoch in np.unique(epochs)])


def by_source(indices: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(list(LENGTHS.values()))
    return [indices[(indices >= end - length) & (indices < end)] for end, length in zip(ends, LENGTHS.values(), strict=True)]


def test_shares_are_those_of_the_weights_and_never_far_from_them() -> None:
    sampler = mixed()
    counts = np.asarray([len(own) for own in by_source(drawn(sampler, 0, 20 * 4096))])
    assert np.abs(counts - 20 * 4096 * SHARES).max() <= 1  # at the end of a block
    batches = drawn(sampler, 0, 40_960).reshape(-1, 256)
    found = np.asarray([len(by_source(batch)[0]) for batch in batches]) / 256
    assert abs(found - SHARES[0]).max() < 0.2 and found.std() > 0.01  # drawn, not dealt out


def test_each_source_has_every_sample_once_before_any_comes_again() -> None:
    for own, length in zip(by_source(drawn(mixed(), 0, 60_000)), LENGTHS.values(), strict=True):
        passes = [own[start : start + length] for start in range(0, len(own) - length + 1, length)]
        assert all(len(set(each.tolist())) == length for each in passes)
        assert len(passes) < 2 or not np.array_equal(passes[0], passes[1])


def test_a_position_is_drawn_alone_as_with_all_others_also_by_a_worker() -> None:
    every = drawn(mixed(), 0, 12_000)
    sampler: Mixed = pickle.loads(pickle.dumps(mixed()))
    for position in (11_999, 0, 4095, 4096, 3570, 3569):
        assert drawn(sampler, position, position + 1)[0] == every[position]
    assert not np.array_equal(every[:100], drawn(mixed(seed=1), 0, 100))


def test_what_was_used_is_counted_at_any_position() -> None:
    for samples in (0, 1, 4096, 9999):
        assert mixed().used(samples) == dict(zip(LENGTHS, map(len, by_source(drawn(mixed(), 0, max(samples, 1))[:samples])), strict=True))


@pytest.mark.parametrize(("weight", "said"), [(0.0, "above 0"), (-1.0, "above 0"), (float("nan"), "above 0"), (1e-4, "1 in 4,096")])
def test_weights_that_cannot_be_drawn_by_are_refused(weight: float, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.sources\.rare\.weight[\s\S]*{said}"):
        mixed(rare=weight)
