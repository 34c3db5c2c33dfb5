"""A model and data sets of which one rank goes wrong, for `model._target_=tests.faults.misbehaving.Model` and the like."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def sleep() -> None:
    time.sleep(1000)


def loop() -> None:
    while True:
        pass


def hold_the_interpreters_lock() -> None:
    re.match("(a?){40}a{40}", "a" * 40)  # backtracks for days, in C


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise ValueError("the model of one rank")


def end() -> None:
    raise StopIteration  # out of a data set: its rank has fewer batches than the others


HANGS: dict[str, Callable[[], None]] = {each.__name__: each for each in (stop, hold_the_interpreters_lock, sleep, loop, deadlock)}
DEATHS: dict[str, Callable[[], None]] = {each.__name__: each for each in (fail, kill, segfault, leave, end)}


def say_when() -> None:
    """Leave the moment of the first fault for the test: a worker of another rank that reads ahead may come to the same sample."""
    with suppress(FileExistsError), Path("moment").open("x") as file:
        json.dump({"time": time.time(), "rank": os.environ["RANK"]}, file)


class Model(nn.Module):
    """Goes wrong in one forward of one rank.

    Args:
        fault: of `HANGS` or `DEATHS`; "" for none.
        rank: the rank.
        call: which forward, from 1.
    """

    def __init__(self, num_classes: int, fault: str, rank: int, call: int = 3) -> None:
        super().__init__()
        self._fault, self._rank, self._call, self._calls = fault, rank, call, 0
        self.map = nn.Linear(3 * 16 * 16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == self._call and os.environ["RANK"] == str(self._rank) and self._fault:
            time.sleep(0.3)  # the others get as far as they can
            say_when()
            (HANGS | DEATHS)[self._fault]()
        logits: Tensor = self.map(images.flatten(1))
        return logits


class Images(Dataset[tuple[Tensor, int]]):
    """Small images, of which one cannot be read as it should.

    Args:
        num_samples: how many.
        fault: what reading that one does: of `HANGS` or `DEATHS`; "" for none.
        at: which one.
    """

    facts: ClassVar = {"num_classes": 10, "image_shape": [3, 16, 16]}

    def __init__(self, num_samples: int = 600, fault: str = "", at: int = 300) -> None:
        self._num_samples, self._fault, self._at = num_samples, fault, at

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self._at and self._fault:
            say_when()
            (HANGS | DEATHS)[self._fault]()
        return torch.full((3, 16, 16), index / self._num_samples), index % 10
