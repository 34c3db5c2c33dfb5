"""Batches on the device, with a GPU that is none: how many streams there are, and how much lies on the device at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.cuda._sanitizer as sanitizer
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.data.mnist import MNIST
from ddp_train.distributed.world import alone
from ddp_train.interfaces import Batch, Pixels, Ratio
from ddp_train.loader import device_copy
from ddp_train.loader.reader import MicroBatch
from ddp_train.objective.classification import Classification
from ddp_train.training.build.data import place_data
from ddp_train.training.loop import trainer as loop
from ddp_train.training.record.records import Record
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
        batches = [MicroBatch((torch.zeros(1), torch.zeros(1))) for _ in range(4)]
        assert len(list(device_copy.copied_ahead(iter(batches), CUDA))) == 4
    assert (len(copies), FakeStream.made) == (12, 1)


class Gpu:
    """A GPU that runs nothing yet: what lies where in its memory, as torch's allocator gives it out, and torch's own look for races.

    Memory that is freed belongs to the stream on which it was asked for, and is given out there again at once; but not while the device has
    yet to do what another stream was noted for (`record_stream`).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handler, self.races = sanitizer.EventHandler(), list[Any]()
        self.free: dict[int, list[int]] = {}
        self.places, self.num_events, self.noted = 0, 0, set[int]()
        self.place_of = dict[int, int]()  # by what a batch on the device has as its value
        self.main, self.current = SeenStream(self, 0), SeenStream(self, 0)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SeenStream(self, 1))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.noted.add(self.place(tensor)))
        monkeypatch.setattr(device_copy, "to_device", lambda batch, device: tuple(map(self.copy, batch)))

    @contextmanager
    def on(self, stream: SeenStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def place(self, tensor: Tensor) -> int:
        return self.place_of[int(tensor)]

    def copy(self, tensor: Tensor) -> Tensor:
        pool, placed = self.free.setdefault(self.current.number, []), tensor.clone()
        if not pool:
            self.places += 1
        place = pool.pop() if pool else self.places
        self.place_of[int(tensor)] = place
        weakref.finalize(placed, lambda: None if place in self.noted else pool.append(place))
        self.launch("copy", written={place})
        return placed

    def read(self, micro_batch: MicroBatch) -> None:
        self.launch("forward", read={self.place(each) for each in micro_batch.on_device or ()})

    def launch(self, name: str, *, read: set[int] = frozenset(), written: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        names = {place: ["batch"] for place in read | written}
        self.races += self.handler._handle_kernel_launch(self.current.number, read, written, set(), name, names)


class SeenStream:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number
        if number:
            gpu.handler._handle_stream_creation(number)

    def record_event(self) -> int:
        self.gpu.num_events += 1
        self.gpu.handler._handle_event_creation(self.gpu.num_events)
        self.gpu.handler._handle_event_record(self.gpu.num_events, self.number)
        return self.gpu.num_events

    def wait_event(self, event: int) -> None:
        self.gpu.handler._handle_event_wait(event, self.number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    device_copy._copying_stream.cache_clear()
    yield Gpu(monkeypatch)
    device_copy._copying_stream.cache_clear()


def _train_and_evaluate(gpu: Gpu) -> None:
    """Read each batch as a step does, with evaluations between them; somebody keeps a batch for longer, and reads it again."""
    batches = iter([MicroBatch((torch.tensor(number),)) for number in range(100)])
    kept = None
    for number, micro_batch in enumerate(device_copy.copied_ahead((next(batches) for _ in range(20)), CUDA)):
        gpu.read(micro_batch)
        if number % 5 == 2:
            kept = micro_batch
        if number % 5 == 4:
            assert kept is not None
            gpu.read(kept)
            kept = None
            for evaluated in device_copy.copied_ahead((next(batches) for _ in range(10)), CUDA):
                gpu.read(evaluated)


def test_memory_of_a_batch_is_given_to_a_later_one_and_nobody_reads_what_is_written(gpu: Gpu) -> None:
    _train_and_evaluate(gpu)
    assert gpu.races == []
    assert gpu.places <= 6, "the steps' three batches, as many of an evaluation within them; the device has computed nothing yet"


def test_torch_sees_the_race_if_the_copies_do_not_wait(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = SeenStream.wait_event
    monkeypatch.setattr(SeenStream, "wait_event", lambda stream, event: None if stream.number else wait(stream, event))
    _train_and_evaluate(gpu)
    assert gpu.races


def test_what_is_on_the_device_already_stays_on_its_own_stream(gpu: Gpu) -> None:
    meta = torch.device("meta")  # a device that is not the host
    there = MicroBatch((torch.tensor(1, device=meta),))
    assert [each.on_device for each in device_copy._copied_ahead(iter([there, there]), meta)] == [None, None]


class Counting(Classification):
    """Has units that depend on the batch's content."""

    def loss(self, model: nn.Module, batch: Batch) -> Ratio:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Ratio(losses, torch.ones_like(losses))


@pytest.mark.parametrize("objective", [Classification(), Counting()])
def test_few_micro_batches_are_on_the_device_at_a_time(
    copies: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch, objective: Classification
) -> None:
    parts = components("loader.micro_batch_size=4", "trainer.grad_accum_steps=8", "trainer.max_steps=2", "evaluation.every_steps=9")
    parts = replace(parts, objective=objective, eval_loaders={})
    monkeypatch.setattr(loop, "copied_ahead", lambda stream, world_device: device_copy.copied_ahead(stream, CUDA))
    alive: list[int] = []
    parts.model.register_forward_hook(lambda *_: alive.append(sum(copy() is not None for copy in copies)))
    trainer(parts).train()
    assert len(alive) == 16
    assert max(alive) == 2


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
