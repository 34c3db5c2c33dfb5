"""`loader.micro_batch_size=auto`: the largest that fits all ranks, which leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.config.saved import answers_of, record_answers
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigErrors, RunError
from ddp_train.interfaces import Run
from ddp_train.interfaces.batch import batch_size
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.reader import MicroBatch
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training.build.build import build
from ddp_train.training.check import micro_batch
from ddp_train.training.check.memory import memory_to_come
from ddp_train.training.check.micro_batch import bisect, largest_micro_batch, sizes_to_try
from tests.unit.parts import checked, components, trainer
from tests.unit.training.threads import on_all, thread_worlds

AUTO = ("loader.micro_batch_size=auto", "trainer.global_batch_size=60")


class FakeDevice:
    """A device on which a sample takes one byte and everything else ten; it has room for some."""

    def __init__(self, samples: int, *, raises: bool = True) -> None:
        self._samples, self._raises = samples, raises
        self.tried: list[int] = []

    def holds(self, batch: MicroBatch) -> None:
        self.tried.append(batch_size(batch.batch))
        if self._raises and self.tried[-1] > self.total() - 10:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def total(self) -> int:
        return round((self._samples + 10) / 0.9)

    def in_use(self) -> int:
        return 10

    def peak(self) -> int:
        return 10 + self.tried[-1]

    def begin(self) -> None:
        pass


@pytest.fixture(autouse=True)
def compiling_again() -> Iterator[None]:
    """Put back whether torch compiles: ranks that are threads of one process end `without_compiling` in any order."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Let this machine have a device with room for 17 samples."""
    fake = FakeDevice(17)
    _let_be(fake, monkeypatch)
    return fake


def _let_be(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    read = PositionedTrainLoader.of_size

    def of_size(self: PositionedTrainLoader, size: int) -> MicroBatch:
        batch = read(self, size)
        fake.holds(batch)
        return batch

    monkeypatch.setattr("ddp_train.config.batch_sizes.resolve_device", lambda device: "cuda")
    monkeypatch.setattr(micro_batch, "DeviceMemory", lambda device: fake)
    monkeypatch.setattr(PositionedTrainLoader, "of_size", of_size)


def test_sizes_are_parts_of_a_share_and_the_search_finds_the_largest_in_few_tries() -> None:
    assert sizes_to_try(10) == [1, 2, 3, 4, 5, 10]
    for most in (1, 2, 7, 60, 1000):
        sizes = sizes_to_try(most)
        for limit in (0, *sizes, most + 1):
            asked: list[int] = []
            found = bisect(sizes, lambda size, asked=asked, limit=limit: asked.append(size) or size <= limit)  # type: ignore[misc]
            assert found == (None if limit < 1 else max(size for size in sizes if size <= limit))
            assert len(asked) <= 2 * most.bit_length()
            assert len(set(asked)) == len(asked)


def test_the_run_has_the_largest_that_fits_and_is_the_run_that_was_given_the_number(device: FakeDevice) -> None:
    found, given = components(*AUTO), ("loader.micro_batch_size=15", "trainer.global_batch_size=60")
    assert found.answers["loader.micro_batch_size"] == 15  # of 12, 15 and 20, which 60 samples can be cut into
    assert found.train_loader.grad_accum_steps == 4
    assert 20 not in device.tried  # what smaller ones take has foretold it
    losses = []
    for overrides in (AUTO, given):
        parts = components(*overrides)
        drawn = torch.rand(1).item()
        steps = trainer(parts)
        assert all(parameter.grad is None for parameter in parts.model.parameters())
        batches = list(steps._of_next_step(parts.train_loader.micro_batches(0)))
        assert [batch_size(each.batch) for each in batches] == [15] * 4
        norm = steps.train_step(batches, global_batch_size=60, measures_norm=True)
        assert norm is not None
        losses.append((drawn, norm.item(), *(each.sum().item() for each in parts.model.parameters())))
    assert losses[0] == losses[1]  # weights, random streams and data are where they would have been


def test_buffers_are_as_they_were(device: FakeDevice) -> None:
    model = components(*AUTO, "model=mini_resnet", "model.width=4", base=["data.num_samples=640", "~metrics.tensorboard"]).model
    counts = [buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert not any(counts)


def test_all_ranks_agree_where_one_has_less(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    devices = [FakeDevice(60), FakeDevice(7), FakeDevice(30)]
    parts = [components(*AUTO) for _ in devices]
    worlds = [replace(world, device=torch.device("cpu", world.rank)) for world in thread_worlds(3)]
    for own, each in zip(devices, parts, strict=True):
        each.train_loader.of_size = partial(_read_on, own, each.train_loader.of_size)  # type: ignore[method-assign]
    monkeypatch.setattr(micro_batch, "DeviceMemory", lambda device: devices[device.index])
    monkeypatch.setattr(micro_batch, "restoring_state", lambda *_: nullcontext())  # what it puts back is of the process, which they share
    monkeypatch.setattr(micro_batch, "try_training", lambda *_: None)
    assert on_all(3, lambda rank: largest_micro_batch(parts[rank], worlds[rank], most=60)) == [7, 7, 7]
    assert max(devices[0].tried) < 60  # nobody goes on without the others


def _read_on(device: FakeDevice, read: Callable[[int], MicroBatch], size: int) -> MicroBatch:
    batch = read(size)
    device.holds(batch)
    return batch


def test_where_ranks_compute_together_no_size_is_tried_that_could_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(17)
    _let_be(fake, monkeypatch)
    parts = components(*AUTO)
    parts = replace(parts, forward_is_collective=True)
    fake.tried.clear()
    assert largest_micro_batch(parts, alone(), most=60) == 15
    assert max(fake.tried) <= 17

    monkeypatch.setattr(fake, "_samples", 60)
    monkeypatch.setattr(PositionedTrainLoader, "of_size", _raise)
    monkeypatch.setattr(micro_batch, "try_training", lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError):  # what cannot be taken back ends the run
        largest_micro_batch(parts, alone(), most=60)


def _raise(self: PositionedTrainLoader, size: int) -> MicroBatch:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_device_without_room_for_one_sample_ends_the_run_and_another_error_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _let_be(FakeDevice(0, raises=False), monkeypatch)
    with pytest.raises(RunError, match="a single sample does not fit the device of rank 0"):
        components(*AUTO)
    fake = FakeDevice(17)
    _let_be(fake, monkeypatch)
    monkeypatch.setattr(fake, "peak", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        components(*AUTO)


def test_the_longest_samples_are_tried() -> None:
    parts = components()
    loader = parts.train_loader
    assert isinstance(loader, PositionedTrainLoader)
    source: Any = loader._reader.samples.source  # type: ignore[attr-defined]
    source.__class__ = type("Measured", (type(source),), {"lengths": property(lambda self: torch.arange(640).numpy())})
    expected, _ = loader.source.batch(torch.arange(635, 640).numpy())
    assert torch.equal(loader.of_size(5).batch[0], expected)


def test_the_state_to_come_is_that_of_the_optimizer_and_of_averages() -> None:
    numbers = sum(parameter.numel() for parameter in components().model.parameters())
    tensors = len(list(components().model.parameters()))
    assert memory_to_come(components("optimizer=adamw")) == pytest.approx(8 * numbers + 4 * tensors)
    assert memory_to_come(components("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false")) == 0
    assert memory_to_come(components("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false", "callbacks=ema")) == 4 * numbers
    parts = components("optimizer=adamw")
    trainer(parts).train_step([parts.train_loader.peek()], global_batch_size=32)
    assert memory_to_come(parts) == 0


def test_what_is_found_is_recorded_and_holds_for_whoever_goes_on(device: FakeDevice, tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    run = checked(*AUTO)
    run_folder.config.write_text(run.yaml())
    record_answers(run_folder.config, run, build(run, alone()).answers)
    assert answers_of(run_folder.root)["loader.micro_batch_size"] == 15
    again = run.with_micro_batch(15)
    assert again.hash() == run.hash()
    assert str(again.batch) == "global batch 60 = micro-batch 15 x 1 rank x accumulation 4"
    device.tried.clear()
    parts = build(again, alone())
    assert parts.train_loader.grad_accum_steps == 4
    assert device.tried == []
    record_answers(run_folder.config, again, parts.answers)
    assert answers_of(run_folder.root)["loader.micro_batch_size"] == 15


def test_batches_that_grow_have_one_micro_batch(device: FakeDevice) -> None:
    parts = components(*AUTO, "trainer.batch_size_schedule={2: 100}", "trainer.max_steps=4")
    assert parts.answers["loader.micro_batch_size"] == 17  # of the larger one: 100 in 6 parts
    assert [parts.train_loader.num_micro_batches(samples) for samples in (0, 60, 120)] == [4, 4, 6]


class Asked:
    """A callback that counts how often its state is asked for."""

    def __init__(self) -> None:
        self.times = 0

    def on_start(self, run: Run) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        self.times += 1
        return {"times": self.times}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@pytest.mark.usefixtures("device")
def test_the_fresh_state_of_a_callback_is_from_before_the_tries() -> None:
    parts = components(*AUTO, f"+callbacks.asked._target_={__name__}.Asked")
    assert parts.fresh_states == {"asked": {"times": 1}}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.global_batch_size=null"], "trainer.global_batch_size: is null"),
        (["trainer.grad_accum_steps=2"], "trainer.grad_accum_steps: is 2"),
        (["objective=contrastive"], "compares the samples of a micro-batch"),
        (["cluster.processes_per_node=2", "strategy.static_graph=true"], "strategy.static_graph: is true"),
        (["loader.micro_batch_size=0"], "at least 1; or auto"),
        (["loader.micro_batch_size=some"], "at least 1; or auto"),
    ],
)
def test_auto_is_refused_where_it_cannot_be(overrides: list[str], said: str, device: FakeDevice) -> None:
    with pytest.raises(ConfigErrors) as found:
        checked(*AUTO, *overrides)
    assert said in str(found.value)


def test_auto_is_for_gpus() -> None:
    with pytest.raises(ConfigErrors, match="is auto, and the run is on CPU"):
        checked(*AUTO)
