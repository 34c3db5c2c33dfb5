"""What the loop keeps on the device: the host waits for it where a record is made, once, and nowhere else.

Each case is tried a second time with an `.item()` planted in it, which must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from ddp_train.distributed.world import alone
from ddp_train.interfaces import Pixels, batch
from ddp_train.loader import device_copy
from ddp_train.loader.reader import MicroBatch
from ddp_train.objective.classification import Classification
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.parts.components import EvaluationComponents
from ddp_train.training.record import log_window
from ddp_train.training.record.log_window import LogWindow
from ddp_train.training.record.logged import Logged, Reduction
from ddp_train.training.train_state import TrainState
from tests.unit.rig.cases import SAMPLES, images, labels, model
from tests.unit.rig.fake_gpu import CUDA, Moved, on_a_gpu, onto_gpu, pin

ON_A_GPU = replace(alone(), device=CUDA)


class Stream:
    """Stands for a stream and its events."""

    def __init__(self, device: torch.device | None = None) -> None: ...

    def record_event(self) -> None: ...

    def wait_event(self, event: None) -> None: ...


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    for made in (device_copy._copying_stream, batch._per_channel):  # which keep a stream, and tensors
        made.cache_clear()
    yield
    for made in (device_copy._copying_stream, batch._per_channel):
        made.cache_clear()


@contextmanager
def reads() -> Iterator[list[int]]:
    """Let `tolist` and `cpu` give zeros, and note how many numbers each call has waited for."""
    found: list[int] = []

    def zeros(shape: tuple[int, ...]) -> Any:
        return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0

    def tolist(values: Tensor) -> Any:
        if values.device == CUDA:
            found.append(values.numel())
        return zeros(tuple(values.shape))

    def cpu(values: Tensor) -> Tensor:
        found.append(values.numel())
        return torch.zeros(values.shape, dtype=values.dtype)

    with patch.object(FakeTensor, "tolist", tolist), patch.object(FakeTensor, "cpu", cpu, create=True):
        yield found


def steps(window: LogWindow, logged: Logged, number: int) -> None:
    for _ in range(number):
        window.begin_step()
        for _ in range(2):
            window.add(torch.empty((), device=CUDA), turn="first")
        logged.add("mine", torch.empty((), device=CUDA))
        window.end_step(torch.empty((), device=CUDA), samples=8)


def take_steps() -> None:
    """Take more steps than there was room for, and log in each of them."""
    with on_a_gpu(sends=True) as moves:
        window, logged = LogWindow(CUDA, turns=["first"]), Logged(TrainState())
        moves.sends = False
        steps(window, logged, 70)
        window.mark_judged([1.0] * 70, skipped=[3])
        window.reset()


def record() -> None:
    """Read the device for a record, with a name that ranks have agreed on."""
    with on_a_gpu(sends=True), reads() as found:
        window, logged = LogWindow(CUDA, turns=["first"]), Logged(TrainState(logged_names=["mine"]))
        steps(window, logged, 5)
        reduction = Reduction(ON_A_GPU)
        groups = logged.add_to(reduction)
        reading = window.read(reduction, torch.empty((), device=CUDA))
        assert len(reading.totals) == len(reading.num_units) == 5
        logged.reduce_and_reset(ON_A_GPU, groups)
    assert len(found) == 1, "the device is read once"


def batches(*, pinned: bool = True) -> list[MicroBatch]:
    """Return some as the loader gives them: one of bytes, one of numbers."""
    place = pin if pinned else lambda values: values
    as_bytes = Pixels(place(torch.zeros(SAMPLES, 3, 32, 32, dtype=torch.uint8)), place(labels(SAMPLES)), (1.0,) * 3, (0.0,) * 3)
    return [MicroBatch(as_bytes), MicroBatch((place(images()), place(labels(SAMPLES))), num_samples=SAMPLES)] * 2


def copy_batches(*, pinned: bool = True) -> None:
    """Copy batches to the device, one ahead."""
    with on_a_gpu(sends=True) as moves:
        device_copy.to_device(batches()[0].batch, CUDA)  # one value for each channel, kept
        moves.sends = False
        for micro_batch in device_copy.copied_ahead(iter(batches(pinned=pinned)), CUDA):
            with device_copy.batch_on(CUDA, micro_batch) as (found, target):
                assert found.device == target.device == CUDA


class NoAmp:
    """Computes as the model is."""

    def autocast(self, device: torch.device) -> Any:
        return nullcontext()


class Summing(Classification):
    """Divides nothing by a number of samples that is not known."""

    def metrics(self, totals: Any) -> dict[str, float]:
        return {}


class Batches(list[MicroBatch]):
    skips_bad_samples = False


def evaluate_all() -> None:
    """Evaluate some batches; the sums are read when all are through."""
    with on_a_gpu(sends=True), reads() as found:
        network = onto_gpu(model("mlp"))
        loaders: Any = {"": Batches(batches())}
        parts = EvaluationComponents(model=network, trained_module=network, objective=Summing(), amp=NoAmp(), eval_loaders=loaders)  # type: ignore[arg-type]
        evaluate(parts, ON_A_GPU)
    assert len(found) == 2, "the floats and the integers, whatever the number of batches and sums"


CASES: dict[str, tuple[Callable[[], None], Any, str]] = {
    "steps": (take_steps, log_window._LossColumn, "add"),
    "what a step logs": (take_steps, Logged, "add"),
    "a record": (record, LogWindow, "end_step"),
    "batches": (copy_batches, device_copy, "to_device"),
    "an evaluation": (evaluate_all, Classification, "measure"),
    "the model that is evaluated": (evaluate_all, nn.Linear, "forward"),
}
"""What is done, and where an `.item()` is planted."""


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_the_device_in_a_record_alone(name: str) -> None:
    CASES[name][0]()


@pytest.mark.parametrize("name", CASES)
def test_an_item_that_is_planted_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    do, owner, method = CASES[name]
    plain = getattr(owner, method)

    def planted(*given: Any, **named: Any) -> Any:
        found = plain(*given, **named)
        torch.empty((), device=CUDA).item()
        return found

    monkeypatch.setattr(owner, method, planted)
    with pytest.raises(DataDependentOutputException):
        do()


def test_a_batch_that_is_not_pinned_is_found() -> None:
    with pytest.raises(Moved, match="from cpu to cuda"):
        copy_batches(pinned=False)


def test_a_copy_that_the_host_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "to_device", lambda batch, device: tuple(each.to(device) for each in batch))
    with on_a_gpu(), pytest.raises(Moved, match="from cpu to cuda"):
        list(device_copy.copied_ahead(iter(batches()[1:2]), CUDA))
