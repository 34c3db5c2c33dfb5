"""Which sample comes where: by shuffle, by weight, balanced over classes, gathered by length."""

from __future__ import annotations

from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddp_train.errors import ConfigError, ConfigErrors, DataError, UserError
from ddp_train.interfaces import Indices, Sampler
from ddp_train.loader.dataset_adapter import as_source
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Balanced, Bucketed, Iterated, Shuffled, Weighted, read_weights, sampler_from
from tests.unit.loader.numbers import Numbers
from tests.unit.parts import checked, components

quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def sentences(num_samples: int, seed: int = 0) -> NDArray[np.int64]:
    """Return lengths with many ties."""
    return np.random.default_rng(seed).integers(1, 40, num_samples)


def draws(num_samples: int = 3000) -> dict[str, Sampler]:
    rng = np.random.default_rng(0)
    weights, labels = rng.random(num_samples), rng.integers(0, 7, num_samples)
    single: dict[str, Sampler] = {
        "shuffled": Shuffled(num_samples, seed=5),
        "weighted": Weighted(weights, seed=5),
        "balanced": Balanced(labels, seed=5),
    }
    lengths = sentences(num_samples)
    return single | {
        f"bucketed {name}": Bucketed(draw, lengths, global_batch_size=32, batches=10 if name == "shuffled" else 7)
        for name, draw in single.items()
    }


@pytest.mark.parametrize("name", draws())
def test_a_draw_can_be_entered_anywhere_in_any_order(name: str) -> None:
    draw = draws()[name]
    for epoch in (0, 3):
        whole = draw(epoch, np.arange(draw.length))
        somewhere = np.random.default_rng(1).permutation(draw.length)[:500]
        assert np.array_equal(draws()[name](epoch, somewhere), whole[somewhere])
    assert not np.array_equal(draw(0, np.arange(50)), draw(1, np.arange(50)))


@pytest.mark.parametrize("name", draws())
def test_a_draw_goes_to_a_worker_without_what_it_holds_for_each_sample(name: str) -> None:
    large = draws(100_000)[name]
    assert len(ForkingPickler.dumps(large)) < 10_000


def test_workers_draw_what_the_rank_would() -> None:
    read = []
    for num_workers in (0, 2):
        order = SampleOrder(draws()["bucketed weighted"], global_batch_size=32, drop_last=False)
        order.indices(0, 0, 1)  # with a block at hand
        loader = PositionedTrainLoader(
            Numbers(3000), order, rank=0, world_size=1, grad_accum_steps=1, num_workers=num_workers, pin_memory=False
        )
        stream = loader.micro_batches(32)
        read.append([micro_batch.batch.tolist() for micro_batch in islice(stream, 4)])
        stream.close()  # type: ignore[attr-defined]
    assert read[0] == read[1]


def test_weights_are_met_and_zeros_never_come() -> None:
    weights = np.tile([0.0, 1.0, 2.0, 5.0, 0.0], 20_000)
    for seed in range(3):
        drawn = Weighted(weights, seed=seed)(epoch=2, positions=np.arange(100_000))
        counts = np.bincount(drawn % 5, minlength=5)
        expected = 100_000 * np.asarray([0, 1, 2, 5, 0]) / 8
        assert counts[0] == counts[4] == 0
        assert np.abs(counts - expected).max() < 6 * 25_000**0.5
    _, times = np.unique(drawn[drawn % 5 == 3], return_counts=True)
    assert np.var(times) == pytest.approx(np.mean(times), abs=1.0)  # drawn independently


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e308])
def test_weights_of_any_size_are_drawn_by(scale: float) -> None:
    drawn = Weighted(np.asarray([0.0, scale, 0.0, scale, 0.0]), seed=0)(0, np.arange(1000))
    assert set(drawn.tolist()) == {1, 3}


labels_of_some = st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=60)


@quick
@given(labels=labels_of_some, seed=st.integers(0, 2**32), multiple_of=st.sampled_from([1, 2, 6]))
def test_every_round_has_each_class_once_and_samples_come_evenly(labels: list[int], seed: int, multiple_of: int) -> None:
    draw = Balanced(np.asarray(labels), seed=seed, multiple_of=multiple_of)
    if draw.length == 0:
        return
    run = np.concatenate([draw(epoch, np.arange(draw.length)) for epoch in range(5)])
    classes = np.asarray(labels)[run]
    num_classes = len(set(labels))
    for start in range(0, len(run) - num_classes + 1, num_classes):
        assert sorted(classes[start : start + num_classes]) == sorted(set(labels))
    for stop in {len(run) // 3, len(run) // 2, len(run)}:
        times = np.bincount(run[:stop], minlength=len(labels))
        for number in set(labels):
            of_class = times[np.asarray(labels) == number]
            assert of_class.max() - of_class.min() <= 1


def test_classes_and_members_come_in_another_order_each_time() -> None:
    labels = np.arange(400) % 4
    run = Balanced(labels, seed=0)(0, np.arange(400)).reshape(100, 4)
    assert len({tuple(order) for order in labels[run].tolist()}) > 20  # of 24 orders of four classes
    passes = [Balanced(labels, seed=0)(epoch, np.arange(400)) for epoch in range(2)]
    first, second = (drawn[labels[drawn] == 2] for drawn in passes)
    assert sorted(first) == sorted(second) and first.tolist() != second.tolist()
    other_class = passes[0][labels[passes[0]] == 3]
    assert (first - 2).tolist() != (other_class - 3).tolist()


@quick
@given(
    num_samples=st.integers(1, 400),
    batch=st.integers(1, 50),
    batches=st.integers(1, 9),
    kind=st.sampled_from(["shuffled", "weighted", "balanced"]),
)
def test_bucketing_keeps_the_samples_of_each_window_and_gathers_similar_lengths(
    num_samples: int, batch: int, batches: int, kind: str
) -> None:
    inner, lengths = draws(num_samples)[kind], sentences(num_samples)
    batch = min(batch, inner.length)
    bucketed = Bucketed(inner, lengths, global_batch_size=batch, batches=batches)
    plain, found = (draw(1, np.arange(inner.length)) for draw in (inner, bucketed))
    full = inner.length - inner.length % batch
    assert np.array_equal(found[full:], plain[full:])
    for start in range(0, full, batch * batches):
        window = slice(start, min(start + batch * batches, full))
        assert sorted(found[window]) == sorted(plain[window])
        in_batches = lengths[found[window]].reshape(-1, batch)
        ascending = in_batches[np.lexsort((in_batches[:, -1], in_batches[:, 0]))]
        assert np.array_equal(ascending.ravel(), np.sort(lengths[plain[window]]))  # no batch reaches into another's lengths


def test_bucketed_batches_do_not_come_in_the_order_of_their_lengths() -> None:
    lengths = sentences(3200)
    found = Bucketed(Shuffled(3200, seed=0), lengths, global_batch_size=32, batches=10)(0, np.arange(3200))
    longest = lengths[found].reshape(10, 10, 32).max(axis=2).argmax(axis=1)
    assert len(set(longest.tolist())) > 3


class Sentences:
    """A source with whatever the test gives it."""

    def __init__(self, **offered: Any) -> None:
        self.__dict__.update(offered)

    facts: dict[str, Any] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return 100

    def batch(self, indices: Indices) -> Indices:
        return indices


def draw_of(source: Any, **changes: Any) -> Sampler:
    settings = {"sampling": "shuffled", "sample_weights": None, "bucket_batches": None, "multiple_of": 1, "global_batch_size": 8}
    return sampler_from(as_source(source), seed=0, **{**settings, **changes})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(99), r"has float64 \(99,\)\n  expected: numbers \(100,\): one for each sample"),
        (np.ones((100, 1)), r"has float64 \(100, 1\)"),
        (np.asarray(["a"] * 100), "has <U1"),
        (np.r_[np.ones(98), -1.5, -2], r"has weight -1.5 for sample 98 \(2 such weights\)"),
        (np.r_[np.nan, np.ones(99)], "has weight nan for sample 0"),
        (np.r_[np.inf, np.ones(99)], "has weight inf for sample 0"),
        (np.zeros(100), "has only zeros"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(tmp_path: Path, weights: NDArray[Any], message: str) -> None:
    np.save(tmp_path / "weights.npy", weights)
    with pytest.raises(DataError, match=message) as caught:
        read_weights(str(tmp_path / "weights.npy"), 100)
    assert caught.value.key == "loader.sample_weights"


def test_weights_are_whole_numbers_too_and_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "counts.npy", np.arange(100))
    assert read_weights(str(tmp_path / "counts.npy"), 100).dtype == np.float64
    (tmp_path / "text.npy").write_text("1 2 3")
    np.save(tmp_path / "objects.npy", np.asarray([{}] * 100), allow_pickle=True)
    for name in ("missing.npy", "text.npy", "objects.npy"):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            read_weights(str(tmp_path / name), 100)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (Sentences(), {"sampling": "balanced"}, "loader.sampling: is balanced, but Sentences does not provide the classes"),
        (Sentences(labels=np.zeros(99, int)), {"sampling": "balanced"}, r"Sentences.labels is int64 \(99,\)"),
        (Sentences(labels=np.zeros(100)), {"sampling": "balanced"}, "Sentences.labels is float64"),
        (Sentences(), {"bucket_batches": 4}, "loader.bucket_batches: is given, but Sentences does not provide the lengths"),
        (Sentences(lengths=np.zeros(99)), {"bucket_batches": 4}, r"Sentences.lengths is float64 \(99,\)"),
        (
            Sentences(labels=np.arange(100) % 60),
            {"sampling": "balanced", "global_batch_size": 64, "multiple_of": 64},
            "trainer.global_batch_size: is 64, more than a balanced epoch",
        ),
    ],
)
def test_a_data_set_that_lacks_what_is_needed_is_refused(source: Sentences, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw_of(source, **changes)


def test_a_plain_dataset_may_have_labels_and_lengths() -> None:
    class Plain(torch.utils.data.Dataset[int]):
        labels = [0, 1] * 50
        lengths = list(range(100))  # noqa: RUF012

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            return index

    drawn = draw_of(as_source(Plain()), sampling="balanced", bucket_batches=2)(0, np.arange(100))
    assert np.bincount(drawn % 2).tolist() == [50, 50]


def test_the_keys_of_the_config_choose_the_draw(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.r_[np.ones(3), np.zeros(637)])
    order = components("loader.sampling=weighted", f"loader.sample_weights={tmp_path}/weights.npy").train_loader.order
    assert set(order.indices(0, 0, 640).tolist()) == {0, 1, 2}
    order = components("loader.sampling=balanced", "loader.drop_last=true").train_loader.order
    assert np.bincount(order.indices(0, 0, 30) % 10).tolist() == [3] * 10
    with pytest.raises(ConfigError, match=r"loader\.bucket_batches: is given, but SyntheticImages"):
        components("loader.bucket_batches=4")


def test_targets_are_classes_too_as_torchvisions_and_those_of_a_label() -> None:
    class Targets(torch.utils.data.Dataset[int]):
        targets = torch.arange(100) % 2

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            return index

    drawn = draw_of(as_source(Targets()), sampling="balanced")(0, np.arange(10))
    assert np.bincount(drawn % 2).tolist() == [5, 5]


class Every:
    """A sampler as torch has them: every second sample, in an order that it draws."""

    def __init__(self, data_source: Any, step: int = 2, generator: torch.Generator | None = None) -> None:
        self.length_of, self.step, self.generator, self.epochs = len(data_source), step, generator, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter((torch.randperm(self.length_of // self.step, generator=self.generator) * self.step).tolist())


class Last:
    """A sampler as ours are."""

    repeats, window = False, 1

    def __init__(self, dataset: Any, seed: int) -> None:
        self.length, self.seed = len(dataset), seed

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        return self.length - 1 - positions


def test_a_sampler_of_others_is_entered_anywhere_and_leaves_the_streams_alone() -> None:
    before = torch.get_rng_state()
    sampler = Iterated(Every(range(100)), num_samples=100, seed=3)
    first, second = (sampler(epoch, np.arange(50)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(0, 100, 2)) and first.tolist() != second.tolist()
    assert sampler(0, np.asarray([7, 3])).tolist() == first[[7, 3]].tolist()
    copy = ForkingPickler.loads(ForkingPickler.dumps(sampler))
    assert copy(1, np.arange(50)).tolist() == second.tolist()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (Every(range(100), generator=torch.Generator()), "gives a different order the second time"),
        ([[0, 1], [2, 3]], "an index for each sample, not batches of them"),
        ([99, 100], "gives the indices 99 to 100"),
        ([], "gives the indices none"),
    ],
)
def test_a_sampler_whose_order_cannot_be_had_again_is_refused(sampler: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Iterated(sampler, num_samples=100, seed=0)


def test_a_sampler_by_target_gets_what_it_asks_for() -> None:
    order = components(f"+loader.sampler._target_={__name__}.Every").train_loader.order
    assert order.epoch_size == 320
    order = components(f"+loader.sampler._target_={__name__}.Last").train_loader.order
    assert order.indices(0, 0, 3).tolist() == [639, 638, 637]
    with pytest.raises(ConfigErrors, match=r"loader\.sampler says which sample comes when"):
        checked(f"+loader.sampler._target_={__name__}.Last", "loader.sampling=balanced")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loader.sampling=weighted"], "loader.sample_weights: is not given"),
        (["loader.sample_weights=w.npy"], "loader.sample_weights: is given, but loader.sampling is shuffled"),
        (["loader.sampling=balanced", "loader.sample_weights=w.npy"], "is given, but loader.sampling is balanced"),
        (["loader.sampling=wieghted"], "fix: loader.sampling=weighted"),
        (["loader.bucket_batches=0"], "loader.bucket_batches: is 0"),
    ],
)
def test_keys_that_do_not_fit_are_refused_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        checked(*overrides)
