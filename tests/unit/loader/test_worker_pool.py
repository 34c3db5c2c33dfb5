"""Loader workers that end are missed, with what they read."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import islice

import pytest
import torch

from ddp_train.errors import DataError, RunError, UserError
from ddp_train.loader.loader import TrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Shuffled
from tests.unit.loader.numbers import Damaged, Numbers, read


def test_a_sample_that_kills_a_worker_is_found() -> None:
    with pytest.raises(DataError, match=r"sample 7 \(file_7.txt\) ends the process that reads it: it was ended by SIGKILL"):
        read(Damaged(32, deadly=[7]), workers=2)


def test_a_worker_that_is_killed_from_outside_is_named_with_what_it_read() -> None:
    order = SampleOrder(Shuffled(32, seed=0), global_batch_size=8, drop_last=False)
    loader = TrainLoader(Numbers(32), order, rank=0, world_size=1, grad_accum_steps=1, num_workers=1, pin_memory=False)
    stream = loader.micro_batches(0)
    next(stream)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGKILL)
    with pytest.raises(RunError, match=r"was ended by SIGKILL while it read the samples \[.*\]; they can be read"):
        list(islice(stream, 8))


def test_a_data_set_that_cannot_be_pickled_is_refused() -> None:
    source = Numbers(32)
    source.batch = lambda indices: torch.zeros(1)  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"cannot be sent to loader workers: .*lambda"):
        read(source, workers=1)
