"""The samples of several sources as one: read, augmented and placed by the source that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ddp_train.errors import ConfigError, DataError
from ddp_train.interfaces import Indices, Measured
from ddp_train.loader.dataset_adapter import DatasetSource
from ddp_train.loader.mixture_source import MixtureSource, mixture_source
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.reader import TrainReader, TrainRequest


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

    def augment(self, batch: dict[str, torch.Tensor], keys: NDArray[np.uint64]) -> dict[str, torch.Tensor]:
        return {**batch, "x": batch["x"] + torch.from_numpy((keys % np.uint64(1000)).astype(np.float32))[:, None] / 1e4}


class Drawing(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset whose transform draws."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(2), "y": torch.tensor(index)}


def mixture(*parts: Any) -> MixtureSource:
    return mixture_source(dict(zip("abc", parts, strict=False)), dict.fromkeys("abc", 1.0))


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
    read = TrainReader(source, order, skips=False)
    whole = read(TrainRequest(0, 0, 16, True)).batch
    parts = [read(TrainRequest(0, start, start + 4, True)).batch for start in range(0, 16, 4)]
    assert torch.equal(whole["x"], torch.cat([part["x"] for part in parts]))
    is_changed = whole["x"][:, 0] != whole["y"]
    assert is_changed[whole["y"] < 100].all() and not is_changed[whole["y"] >= 200].any()  # Drawing's, and the second's
    assert is_changed[(whole["y"] >= 100) & (whole["y"] < 200)].all()
    assert not torch.equal(whole["x"], read(TrainRequest(1, 0, 16, True)).batch["x"])


def test_facts_are_those_of_all_and_may_not_differ() -> None:
    assert mixture(Numbers(0, 1, vocab_size=5, bytes_per_token=1.5), Numbers(0, 1, bytes_per_token=2.0)).facts == {"vocab_size": 5}
    with pytest.raises(ConfigError, match=r"data\.sources\.b: has vocab_size 6, and data\.sources\.a has 5"):
        mixture(Numbers(0, 1, vocab_size=5), Numbers(0, 1, vocab_size=6))


def test_samples_of_other_shapes_are_refused() -> None:
    source = mixture(Numbers(0, 2), Numbers(0, 2, width=3))
    with pytest.raises(DataError, match=r"a gives \{x: float32 \[1, 2\].*b gives \{x: float32 \[1, 3\]"):
        source.batch(np.asarray([0, 3]))
    with pytest.raises(ConfigError, match=r"data\.sources\.a cannot live on the device"):
        source.to(torch.device("cpu"))


class Texts(Numbers):
    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.arange(len(self)) + self._first


def test_lengths_are_known_where_all_sources_know_theirs() -> None:
    known = mixture(Texts(5, 2), Texts(0, 3))
    assert isinstance(known, Measured) and known.lengths.tolist() == [5, 6, 0, 1, 2]
    assert not isinstance(mixture(Texts(5, 2), Numbers(0, 2)), Measured)


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
