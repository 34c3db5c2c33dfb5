"""Batches on the device, with a GPU that is none: how many streams there are, and how much lies on the device at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.data.mnist import MNIST
from ddp_train.distributed.world import alone
from ddp_train.interfaces import Batch, Pixels
from ddp_train.loader import device_copy
from ddp_train.loader.reader import MicroBatch
from ddp_train.objective.classification import Classification
from ddp_train.training import trainer as loop
from ddp_train.training.build_data import place_data
from ddp_train.training.records import Record
from tests.unit.data_files import write_mnist
from tests.unit.parts import checked, components, trainer

CUDA = torch.device("cuda", 0)


class FakeStream:
    """Counts the streams that are made."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        FakeStream.made += 1

    def record_event(self) -> None: ...

    def wait_event(self, event: None) -> None: ...


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Tensor]]]:
    """Let copies to the GPU stay on the CPU, and return all that were made."""
    made: list[weakref.ref[Tensor]] = []

    def to_device(batch: Batch, device: torch.device) -> Batch:
        placed = [each.clone() for each in batch]
        made.append(weakref.ref(placed[0]))
        return tuple(placed)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(device_copy, "to_device", to_device)
    device_copy._copying_stream.cache_clear()
    stream, FakeStream.made = FakeStream(CUDA), 0
    yield made
    device_copy._copying_stream.cache_clear()


def test_all_copies_to_a_device_go_through_one_stream(copies: list[Any]) -> None:
    for _ in range(3):
        batches = [MicroBatch((torch.zeros(1), torch.zeros(1)), counts=True) for _ in range(4)]
        assert len(list(device_copy.copied_ahead(iter(batches), CUDA))) == 4
    assert (len(copies), FakeStream.made) == (12, 1)


class Weighing(Classification):
    """Weighs by content, so that the micro-batches of a step are all read before its first forward."""

    def weight(self, batch: Batch) -> Any:
        return torch.tensor(super().weight(batch))


@pytest.mark.parametrize(("objective", "most"), [(Classification(), 2), (Weighing(), 9)])
def test_few_micro_batches_are_on_the_device_at_a_time(
    copies: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch, objective: Classification, most: int
) -> None:
    parts = components("loader.micro_batch_size=4", "trainer.grad_accum_steps=8", "trainer.max_steps=2", "evaluation.every_steps=9")
    parts.objective, parts.eval_loaders = objective, {}
    monkeypatch.setattr(loop, "copied_ahead", lambda stream, world_device: device_copy.copied_ahead(stream, CUDA))
    alive: list[int] = []
    parts.model.register_forward_hook(lambda *_: alive.append(sum(copy() is not None for copy in copies)))
    trainer(parts).train()
    assert len(alive) == 16
    assert max(alive) == most


@pytest.mark.parametrize(
    "changes", [[], ["loader.mixup_alpha=0.4", "loader.cutmix_alpha=1", "data.crop_padding=2"], ["loader.num_workers=1"]]
)
def test_a_run_with_images_that_travel_as_bytes_is_the_run_without(tmp_path: Path, changes: list[str]) -> None:
    write_mnist(tmp_path, num_train=40, num_test=20, image_size=8)
    curves = []
    for as_bytes in (False, True):
        base = ["data=mnist", f"data.root={tmp_path}", "model=mlp", "model.width=16", "~metrics.tensorboard", "loader.micro_batch_size=8"]
        parts = components("trainer.max_epochs=2", "evaluation.batch_size=7", *changes, base=base)
        sources = [parts.train_loader.source, *(each.source for each in parts.eval_loaders.values())]  # type: ignore[attr-defined]
        if as_bytes:
            place_data(sources, checked(base=base).loader, replace(alone(), device=torch.device("cuda")))
            assert isinstance(parts.train_loader.peek().batch, Pixels)
            assert isinstance(next(iter(parts.eval_loaders.values())).peek().batch, Pixels)  # type: ignore[union-attr]
        records: list[Record] = []
        trainer(parts, write=records.append, sanity_check=True).train()
        numbers = [tuple(record.get(name) for name in ("split", "step", "loss", "accuracy", "grad_norm")) for record in records]
        curves.append((numbers, [parameter.tolist() for parameter in parts.model.parameters()]))
    assert curves[0] == curves[1]


def test_images_travel_as_bytes_to_gpus_alone(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    source = MNIST(str(tmp_path))
    place_data([source], checked().loader, alone())
    assert not isinstance(source.batch(np.arange(2)), Pixels)
