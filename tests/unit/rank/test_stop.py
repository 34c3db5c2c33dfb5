"""Asking ranks to stop or to save, as threads of this process; real ranks are in tests/distributed/test_stop.py."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest

from ddp_train.distributed.world import alone
from ddp_train.rank.peers import Peers
from ddp_train.rank.stop import WALLTIME, Stop
from ddp_train.system.process import STOP_SIGNALS
from tests.unit.rank.together import three_ends, three_worlds


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_makes_the_step_that_is_being_taken_the_last_and_afterwards_everything_is_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS]
    descriptors = len(os.listdir("/proc/self/fd"))
    stop = Stop(world=alone(), peers=Peers.connect(alone()))
    with stop.listening():
        stop.begin_training(0)
        assert not stop.agree_after(1).is_last_step
        os.kill(os.getpid(), number)
        assert stop.cause() == number
        assert stop.is_asked()
        assert stop.agree_after(2).is_last_step
    assert [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stop")]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_stops_by_itself_when_the_time_is_up() -> None:
    end = time.time() + 0.2
    stop = Stop(world=alone(), peers=Peers.connect(alone()), stops_at=end)
    with stop.listening():
        stop.begin_training(0)
        assert not stop.is_asked()
        assert stop.cause() is WALLTIME
        assert stop.agree_after(1).is_last_step


def test_a_time_that_was_moved_is_waited_for() -> None:
    end = time.time() + 0.2
    stop = Stop(world=alone(), peers=Peers.connect(alone()), stops_at=end, ask_stops_at=lambda: end + 0.4)
    with stop.listening():
        stop.begin_training(0)
        assert stop.cause() is WALLTIME and time.time() >= end + 0.4


def test_the_signal_is_noticed_while_the_main_thread_runs_no_python() -> None:
    stop = Stop(world=alone(), peers=Peers.connect(alone()))
    noticed_after_s: list[float] = []

    def send() -> None:
        time.sleep(0.1)
        started = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.cause()
        noticed_after_s.append(time.monotonic() - started)

    sending = threading.Thread(target=send)
    with stop.listening():
        stop.begin_training(0)
        sending.start()
        started = time.monotonic()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)  # one call of C that lets other threads run, as a collective
        in_c_s = time.monotonic() - started
        sending.join()
    assert noticed_after_s[0] < in_c_s / 2


@contextmanager
def _three_ranks(name: str) -> Iterator[list[Stop]]:
    worlds = three_worlds()
    stops = [Stop(world=world, peers=end) for world, end in zip(worlds, three_ends(worlds, name=name), strict=True)]
    with ExitStack() as listening:
        for stop in reversed(stops):  # rank 0 last: it is left first, and ends the others' threads
            listening.enter_context(stop.listening())
            stop.begin_training(0)
        yield stops


def _train_apart(stops: list[Stop], take_steps: Callable[[Stop, Callable[[], None]], Any]) -> list[Any]:
    """Let three ranks take steps that do not communicate, rank 0 the slowest; return what each found."""
    found: list[Any] = [None] * 3

    def run(rank: int) -> None:
        draw = random.Random(rank)
        found[rank] = take_steps(stops[rank], lambda: time.sleep(draw.random() * (2e-3 if rank == 0 else 5e-4)))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    if take_steps is _until_the_last:
        os.kill(os.getpid(), signal.SIGTERM)
    for thread in threads:
        thread.join(timeout=20)
    return found


def _until_the_last(stop: Stop, wait: Callable[[], None]) -> int:
    step = 1
    while not stop.agree_after(step).is_last_step:
        wait()
        step += 1
    return step


def _until_three_saves(stop: Stop, wait: Callable[[], None], save: Callable[[], Any]) -> list[int]:
    saves: list[int] = []
    for step in count(1):
        if stop.agree_after(step).is_save_agreed:
            saves.append(step)
            save()
            if len(saves) == 3:
                break
        else:
            stop.ask_to_save()
        wait()
    return saves


@pytest.mark.parametrize("trial", range(5))
def test_ranks_that_run_ahead_of_each_other_stop_after_the_same_step(trial: int) -> None:
    with _three_ranks(f"stop {trial}") as stops:
        last = _train_apart(stops, _until_the_last)
    assert last[0] > 1
    assert last == last[:1] * 3


def test_ranks_that_run_ahead_of_each_other_save_after_the_same_steps() -> None:
    with _three_ranks("save") as stops:
        saves = _train_apart(stops, partial(_until_three_saves, save=threading.Barrier(3, timeout=5).wait))
    assert len(saves[0]) == 3
    assert saves == saves[:1] * 3
