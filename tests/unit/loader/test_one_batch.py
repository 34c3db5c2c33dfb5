"""One global batch again and again: always the same tensors, on any number of ranks, for data with and without positions."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from ddp_train.loader.one_batch import OneBatch
from ddp_train.loader.stream import Stream, StreamLoader, StreamOrder
from tests.unit.loader.streams import Counting
from tests.unit.parts import components, trainer


def loaders(source: str, world_size: int) -> list[Any]:
    made = []
    for rank in range(world_size):
        split: dict[str, Any] = {"rank": rank, "world_size": world_size, "grad_accum_steps": 2, "num_workers": 0, "pin_memory": False}
        if source == "stream":
            made.append(StreamLoader(Stream(Counting(100), None), StreamOrder(100, global_batch_size=8, drop_last=True), **split))
        else:
            parts = components("trainer.grad_accum_steps=2", "loader.micro_batch_size=4", "loader.drop_last=true")
            made.append(parts.train_loader)
    return made


@pytest.mark.parametrize(("source", "world_size"), [("numbers", 1), ("stream", 1), ("stream", 3)])
@pytest.mark.parametrize("samples", [0, 16])
def test_every_step_has_the_first_steps_tensors(source: str, world_size: int, samples: int) -> None:
    for plain, given in zip(loaders(source, world_size), loaders(source, world_size), strict=True):
        first = list(islice(plain.micro_batches(0), 2))
        found = list(islice(OneBatch(given).micro_batches(samples), 6))
        for number, micro_batch in enumerate(found):
            torch.testing.assert_close(micro_batch.batch, first[number % 2].batch, rtol=0, atol=0)
            assert micro_batch.counts == first[number % 2].counts


def test_a_model_that_changes_its_inputs_changes_its_own() -> None:
    (given,) = loaders("stream", 1)
    stream = OneBatch(given).micro_batches(0)
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
