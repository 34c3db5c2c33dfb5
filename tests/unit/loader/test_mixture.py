"""The samples of several sources as one: read, augmented and placed by the source that has them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ddp_train.errors import ConfigError, DataError
from ddp_train.interfaces import Indices
from ddp_train.loader.dataset_adapter import DatasetSource, as_source
from ddp_train.loader.mixture import MixtureSampler, MixtureSource
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.reader import TrainReader, TrainRequest
from ddp_train.loader.sampler import Shuffled, key_of


class Numbers:
    """Samples that say which they are."""

    def __init__(self, first: int, length: int, *, augments: bool = False, width: int = 2, **facts: Any) -> None:
        self._first, self._length, self.augments, self._width = first, length, augments, width
        self.facts: Mapping[str, Any] = facts

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        numbers = torch.from_numpy(indices + self._first)
        return {"x": numbers[:, None].repeat(1, self._width).float(), "y": numbers}

    def augment(self, batch: dict[str, torch.Tensor], keys: NDArray[np.uint64], indices: Indices) -> dict[str, torch.Tensor]:
        return {**batch, "x": batch["x"] + torch.from_numpy((keys % np.uint64(1000)).astype(np.float32))[:, None] / 1e4}


class Drawing(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset whose transform draws."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(2), "y": torch.tensor(index)}


def mixture(*parts: Any) -> MixtureSource:
    return MixtureSource(dict(zip("abc", map(as_source, parts), strict=False)), dict.fromkeys("abc", 1.0))


def test_each_sample_is_at_its_row_and_is_its_sources() -> None:
    source = mixture(Numbers(100, 4), Numbers(200, 3), Numbers(300, 2))
    assert len(source) == 9
    indices = np.asarray([8, 0, 4, 4, 3, 7])
    assert source.batch(indices)["y"].tolist() == [301, 100, 200, 200, 103, 300]
    assert source.batch(indices[:1])["x"].tolist() == [[301.0, 301.0]]
    assert source.where(5) == "data.sources.b, sample 1"


def test_a_sample_looks_the_same_whatever_it_is_read_with() -> None:
    source = mixture(Numbers(100, 40, augments=True), Numbers(200, 30), DatasetSource(Drawing()))
    order = SampleOrder(
        source.sampler(seed=3, sampling="shuffled", sample_weights=None, multiple_of=1), global_batch_size=16, drop_last=False
    )
    read = TrainReader(source, order, skips_bad_samples=False)
    whole = read(TrainRequest(0, 0, 16)).batch
    parts = [read(TrainRequest(0, start, start + 4)).batch for start in range(0, 16, 4)]
    assert torch.equal(whole["x"], torch.cat([part["x"] for part in parts]))
    is_changed = whole["x"][:, 0] != whole["y"]
    assert is_changed[whole["y"] < 100].all() and not is_changed[whole["y"] >= 200].any()  # Drawing's, and the second's
    assert is_changed[(whole["y"] >= 100) & (whole["y"] < 200)].all()
    assert not torch.equal(whole["x"], read(TrainRequest(1, 0, 16)).batch["x"])


def test_facts_are_those_of_all_and_may_not_differ() -> None:
    assert mixture(Numbers(0, 1, vocab_size=5, bytes_per_token=1.5), Numbers(0, 1, bytes_per_token=2.0)).facts == {"vocab_size": 5}
    with pytest.raises(ConfigError, match=r"data\.sources\.b: has vocab_size 6, and data\.sources\.a has 5"):
        mixture(Numbers(0, 1, vocab_size=5), Numbers(0, 1, vocab_size=6))


def test_samples_of_other_shapes_are_refused() -> None:
    source = mixture(Numbers(0, 2), Numbers(0, 2, width=3))
    with pytest.raises(DataError, match=r"a gives \{x: float32 \[1, 2\].*b gives \{x: float32 \[1, 3\]"):
        source.batch(np.asarray([0, 3]))
    with pytest.raises(ConfigError, match=r"a Numbers cannot live on the device"):
        source.to(torch.device("cpu"))


class Texts(Numbers):
    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.arange(len(self)) + self._first


def test_lengths_are_known_where_all_sources_know_theirs() -> None:
    known = mixture(Texts(5, 2), Texts(0, 3))
    assert known.lengths is not None and known.lengths.tolist() == [5, 6, 0, 1, 2]
    assert mixture(Texts(5, 2), Numbers(0, 2)).lengths is None


def test_within_a_source_sampling_is_what_the_loader_says(tmp_path: Any) -> None:
    np.save(tmp_path / "w.npy", np.asarray([0.0, 1.0, 0.0, 0.0, 5.0]))
    source = mixture(Numbers(0, 3), Numbers(0, 2))
    settings: dict[str, Any] = {"seed": 0, "sampling": "weighted", "multiple_of": 1}
    sampler = source.sampler(sample_weights=str(tmp_path / "w.npy"), **settings)
    found = np.concatenate([sampler(epoch, np.arange(5)) for epoch in range(100)])
    assert set(found.tolist()) == {1, 4} and abs((found == 4).mean() - 0.5) < 0.1
    np.save(tmp_path / "w.npy", np.asarray([1.0, 1.0, 1.0, 0.0, 0.0]))
    with pytest.raises(DataError, match=r"only zeros for data\.sources\.b"):
        source.sampler(sample_weights=str(tmp_path / "w.npy"), **settings)


LENGTHS = {"large": 3000, "small": 70, "rare": 500}
WEIGHTS = {"large": 6.0, "small": 3.0, "rare": 0.1}
SHARES = np.asarray(list(WEIGHTS.values())) / sum(WEIGHTS.values())


def mixed(seed: int = 0, **changes: float) -> MixtureSampler:
    samplers = {name: Shuffled(length, seed=key_of(seed, number, 7)) for number, (name, length) in enumerate(LENGTHS.items())}
    return MixtureSampler(samplers, list(LENGTHS.values()), WEIGHTS | changes, seed=seed)


def drawn(sampler: MixtureSampler, start: int, stop: int) -> np.ndarray:
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
    sampler: MixtureSampler = pickle.loads(pickle.dumps(mixed()))
    for position in (11_999, 0, 4095, 4096, 3570, 3569):
        assert drawn(sampler, position, position + 1)[0] == every[position]
    assert not np.array_equal(every[:100], drawn(mixed(seed=1), 0, 100))


def test_what_was_used_is_counted_at_any_position() -> None:
    for samples in (0, 1, 4096, 9999):
        counts = map(len, by_source(drawn(mixed(), 0, max(samples, 1))[:samples]))
        assert mixed().samples_by_source(samples) == dict(zip(LENGTHS, counts, strict=True))


@pytest.mark.parametrize(("weight", "said"), [(0.0, "above 0"), (-1.0, "above 0"), (float("nan"), "above 0"), (1e-4, "1 in 4,096")])
def test_weights_that_cannot_be_drawn_by_are_refused(weight: float, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.sources\.rare\.weight[\s\S]*{said}"):
        mixed(rare=weight)
