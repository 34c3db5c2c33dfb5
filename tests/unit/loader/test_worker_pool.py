"""Loader workers that end are missed, with what they read; a batch comes out of shared memory as it was put in."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from itertools import islice
from typing import Any

import pytest
import torch

from ddp_train.errors import DataError, RunError, UserError
from ddp_train.interfaces import Indices
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Shuffled
from ddp_train.loader.worker_pool import SharedBatch
from tests.unit.loader.numbers import Damaged, Numbers, read


def test_a_sample_that_kills_a_worker_is_found() -> None:
    with pytest.raises(DataError, match=r"sample 7 \(file_7.txt\) ends the process that reads it: it was ended by SIGKILL"):
        read(Damaged(32, deadly=[7]), workers=2)


def test_a_worker_that_is_killed_from_outside_is_named_with_what_it_read() -> None:
    order = SampleOrder(Shuffled(32, seed=0), global_batch_size=8, drop_last=False)
    loader = PositionedTrainLoader(Numbers(32), order, rank=0, world_size=1, grad_accum_steps=1, num_workers=1, pin_memory=False)
    stream = loader.micro_batches(0)
    next(stream)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGKILL)
    with pytest.raises(RunError, match=r"was ended by SIGKILL while it read the samples \[.*\]; they can be read"):
        list(islice(stream, 8))


class Slow(Numbers):
    """Gives its first batch at once, and no other one."""

    def batch(self, indices: Indices) -> torch.Tensor:
        if vars(self).setdefault("asked", False):
            time.sleep(60)
        self.asked = True
        return super().batch(indices)


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let page-locked memory be any memory; return the names of the threads that ask for it."""
    asked: list[str] = []
    empty = torch.empty

    def noted(*shape: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(threading.current_thread().name)
        return empty(*shape, **named)

    monkeypatch.setattr(torch, "empty", noted)
    return asked


def of_pinned(source: Numbers, *, workers: int) -> PositionedTrainLoader:
    order = SampleOrder(Shuffled(32, seed=0), global_batch_size=8, drop_last=False)
    return PositionedTrainLoader(source, order, rank=0, world_size=1, grad_accum_steps=1, num_workers=workers, pin_memory=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_next_batch_is_copied_to_page_locked_memory_by_a_thread_while_one_is_used(pinning: list[str], workers: int) -> None:
    stream = of_pinned(Numbers(32), workers=workers).micro_batches(0)
    batches = [next(stream).batch]
    deadline = time.monotonic() + 20
    while len(pinning) < 2 and time.monotonic() < deadline:  # nobody asks for the second one
        time.sleep(0.01)
    batches += [each.batch for each in islice(stream, 7)]
    stream.close()  # type: ignore[attr-defined]
    assert len(pinning) >= 8
    assert set(pinning) == {"batches"}
    assert [each.tolist() for each in batches[:4]] == [each.batch.tolist() for each in read(Numbers(32), workers=0)]
    assert not [each for each in threading.enumerate() if each.name == "batches"]


def test_a_thread_that_waits_for_a_worker_does_not_keep_a_run_from_ending(pinning: list[str]) -> None:
    stream = of_pinned(Slow(32), workers=1).micro_batches(0)
    next(stream)
    began = time.monotonic()
    stream.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    assert not [each for each in threading.enumerate() if each.name == "batches"]


def test_a_worker_that_dies_is_told_by_its_own_request_though_a_thread_has_met_it(pinning: list[str]) -> None:
    stream = of_pinned(Damaged(32, deadly=[7]), workers=2).micro_batches(0)
    with pytest.raises(DataError, match=r"sample 7 \(file_7.txt\) ends the process that reads it"):
        list(islice(stream, 8))


def test_a_data_set_that_cannot_be_pickled_is_refused() -> None:
    source = Numbers(32)
    source.batch = lambda indices: torch.zeros(1)  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"cannot be sent to loader workers: .*lambda"):
        read(source, workers=1)


def test_batches_of_any_size_and_structure_come_out_as_they_went_in() -> None:
    ours = SharedBatch()
    theirs = SharedBatch(ours.descriptor)  # as the other process has it
    for numel in (10, 100_000, 3):
        batch = {"images": torch.rand(numel, 3)[:, ::2], "labels": [torch.arange(numel), torch.empty(0, 4)], "names": ("a", numel)}
        found = theirs.copy_out(ours.put(batch), pin_memory=False)
        assert found["images"].equal(batch["images"])
        assert found["labels"][0].equal(batch["labels"][0])
        assert found["labels"][1].shape == (0, 4)
        assert found["names"] == batch["names"]
        ours.put({"images": torch.zeros(numel, 3)})
        assert found["images"].equal(batch["images"])  # a copy
    ours.close()
