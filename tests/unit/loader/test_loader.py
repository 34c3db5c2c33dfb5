"""Micro-batches: the union over the ranks is the global batch, whatever the split."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.interfaces import Indices
from ddp_train.loader.dataset_adapter import Stream
from ddp_train.loader.loader import OneBatchTrainLoader, PositionedEvaluationLoader, PositionedTrainLoader
from ddp_train.loader.order import BatchOrder, SampleOrder
from ddp_train.loader.sampler import Shuffled
from ddp_train.loader.stream import StreamTrainLoader
from tests.unit.loader.numbers import Damaged, Numbers
from tests.unit.loader.streams import Counting
from tests.unit.parts import components, trainer


class Marked(Numbers):
    """Numbers, with the augmentation's key beside each."""

    def augment(self, batch: Tensor, keys: NDArray[np.uint64], indices: Indices) -> Tensor:
        return torch.stack([batch, torch.from_numpy(keys.astype(np.int64))], dim=1)


def step_ids(length: int, *, world_size: int, parts: int, batch: int, steps: int, samples: int = 0, workers: int = 0) -> list[list[int]]:
    """Return the sample ids of each global batch, as the ranks together read them."""
    streams = [
        PositionedTrainLoader(
            Numbers(length),
            SampleOrder(Shuffled(length, seed=1), global_batch_size=batch, drop_last=False),
            rank=rank,
            world_size=world_size,
            grad_accum_steps=parts,
            num_workers=workers,
            pin_memory=False,
        ).micro_batches(samples)
        for rank in range(world_size)
    ]
    found = []
    for _ in range(steps):
        micro_batches = [micro_batch for stream in streams for micro_batch in islice(stream, parts)]
        found.append([int(value) for micro_batch in micro_batches if not micro_batch.is_stand_in for value in micro_batch.batch])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_ranks_together_read_the_same_batches_whatever_their_number(world_size: int, parts: int) -> None:
    alone = step_ids(101, world_size=1, parts=1, batch=24, steps=12)  # 101 = 4 x 24 + 5: the fifth batch of an epoch has 5
    assert step_ids(101, world_size=world_size, parts=parts, batch=24, steps=12) == alone
    assert sorted(chain.from_iterable(alone[:5])) == list(range(101))


def test_any_position_can_be_entered_with_another_number_of_ranks() -> None:
    whole = step_ids(101, world_size=2, parts=2, batch=24, steps=12)
    assert step_ids(101, world_size=3, parts=1, batch=24, steps=5, samples=101 + 48) == whole[7:]


def test_workers_that_read_ahead_do_not_change_what_is_read() -> None:
    assert step_ids(64, world_size=1, parts=2, batch=16, steps=3, workers=2) == step_ids(64, world_size=1, parts=2, batch=16, steps=3)


def test_a_rank_without_a_sample_gets_a_stand_in() -> None:
    loader = PositionedTrainLoader(
        Numbers(3),
        SampleOrder(Shuffled(3, seed=0), global_batch_size=3, drop_last=False),
        rank=4,
        world_size=5,
        grad_accum_steps=1,
        num_workers=0,
        pin_memory=False,
    )
    micro_batch = next(loader.micro_batches(0))
    assert micro_batch.is_stand_in
    assert len(micro_batch.batch) == 1


def test_augmentation_is_keyed_by_epoch_and_sample_not_by_batch() -> None:
    def keys(world_size: int) -> dict[int, int]:
        found = {}
        for rank in range(world_size):
            order = SampleOrder(Shuffled(40, seed=0), global_batch_size=10, drop_last=False)
            loader = PositionedTrainLoader(
                Marked(40), order, rank=rank, world_size=world_size, grad_accum_steps=1, num_workers=0, pin_memory=False
            )
            for micro_batch in islice(loader.micro_batches(0), 4):
                found.update(micro_batch.batch.tolist())
        return found

    order = SampleOrder(Shuffled(40, seed=0), global_batch_size=10, drop_last=False)
    everyone = np.arange(40)
    assert keys(1) == keys(3) == dict(zip(range(40), order.sample_keys(0, everyone).astype(np.int64).tolist(), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 12])
def test_evaluation_reads_every_sample_once(world_size: int) -> None:
    found: list[int] = []
    for rank in range(world_size):
        for micro_batch in PositionedEvaluationLoader(Numbers(10), rank=rank, world_size=world_size, batch_size=3):
            found += [] if micro_batch.is_stand_in else micro_batch.batch.tolist()
    assert found == list(range(10))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_leaves_bad_samples_out(workers: int, world_size: int) -> None:
    source, found, skipped = Damaged(10, bad=[0, 1, 2, 7]), [], []
    for rank in range(world_size):
        loader = PositionedEvaluationLoader(
            source, rank=rank, world_size=world_size, batch_size=3, num_workers=workers, skips_bad_samples=True
        )
        for micro_batch in loader:
            found += [] if micro_batch.is_stand_in else micro_batch.batch.tolist()
            skipped += [bad.sample for bad in micro_batch.bad_samples]
    assert (found, skipped) == ([3, 4, 5, 6, 8, 9], [0, 1, 2, 7])


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
@pytest.mark.parametrize(("most", "taken"), [(7, 7), (100, 20), (None, 20)])
def test_an_evaluation_takes_the_first_samples_alone_on_any_number_of_ranks(world_size: int, most: int | None, taken: int) -> None:
    loaders = [
        PositionedEvaluationLoader(Numbers(20), rank=rank, world_size=world_size, batch_size=3, max_samples=most)
        for rank in range(world_size)
    ]
    found = [int(value) for loader in loaders for each in loader if not each.is_stand_in for value in each.batch]
    assert sorted(found) == list(range(taken))
    assert {loader.num_samples for loader in loaders} == {taken}


def loaders(source: str, world_size: int) -> list[Any]:
    made = []
    for rank in range(world_size):
        split: dict[str, Any] = {"rank": rank, "world_size": world_size, "grad_accum_steps": 2, "num_workers": 0, "pin_memory": False}
        if source == "stream":
            made.append(StreamTrainLoader(Stream(Counting(100), None), BatchOrder(100, global_batch_size=8, drop_last=True), **split))
        else:
            parts = components("trainer.grad_accum_steps=2", "loader.micro_batch_size=4", "loader.drop_last=true")
            made.append(parts.train_loader)
    return made


@pytest.mark.parametrize(("source", "world_size"), [("numbers", 1), ("stream", 1), ("stream", 3)])
@pytest.mark.parametrize("samples", [0, 16])
def test_every_step_has_the_first_steps_tensors(source: str, world_size: int, samples: int) -> None:
    for plain, given in zip(loaders(source, world_size), loaders(source, world_size), strict=True):
        first = list(islice(plain.micro_batches(0), 2))
        found = list(islice(OneBatchTrainLoader(given).micro_batches(samples), 6))
        for number, micro_batch in enumerate(found):
            torch.testing.assert_close(micro_batch.batch, first[number % 2].batch, rtol=0, atol=0)
            assert micro_batch.is_stand_in == first[number % 2].is_stand_in


def test_a_model_that_changes_its_inputs_changes_its_own() -> None:
    (given,) = loaders("stream", 1)
    stream = OneBatchTrainLoader(given).micro_batches(0)
    first = next(stream).batch
    kept = first.clone()
    first.zero_()
    next(stream)
    assert torch.equal(next(stream).batch, kept)


def test_a_run_learns_its_one_batch_by_heart_and_keeps_its_schedule() -> None:
    words = ["optimizer.lr=0.01", "trainer.max_epochs=60", "data.num_samples=100", "loader.micro_batch_size=32"]
    plain, parts = components(*words), components(*words, "debug=overfit", "debug.max_steps=80")
    losses: list[float] = []
    trainer(parts, write=lambda record: losses.append(record["loss"]) if record["split"] == "train" else None).train()
    assert (parts.total_steps, plain.total_steps) == (80, 240)
    assert parts.train_loader.order.epoch_size == 96  # without the last batch, which is smaller
    assert losses[0] > 2 and losses[-1] < 0.2
