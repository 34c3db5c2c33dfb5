"""What the process that a user typed does with stop signals: the first lets everything save and end, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ddp_train.system.process import EARLY_WARNINGS, STOP_SIGNALS

_COME_BESIDE = (*EARLY_WARNINGS, signal.SIGHUP)
"""Signals that do not count as anybody's asking twice. systemd sends SIGHUP together with SIGTERM, and whoever closes a terminal may
have pressed Ctrl-C before."""


def is_final_stop(number: int, earlier: Sequence[int]) -> bool:
    """Tell whether a stop signal is to end everything at once, and not only after saving: it is the second of those that count."""
    return number not in _COME_BESIDE and any(each not in _COME_BESIDE for each in earlier)


@contextmanager
def held_back() -> Iterator[None]:
    """Let stop signals wait until the block is over; also programs that it starts and waits for do not hear them."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in STOP_SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # which the programs inherit; another thread may still take one
    before: dict[int, Any] = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def stop_signals(stop: Callable[[int], None], kill: Callable[[], None]) -> Iterator[list[int]]:
    """Pass stop signals on while the block runs, and give the list of those that came.

    Args:
        stop: passes a signal on.
        kill: ends everything at once. An early warning and SIGHUP never do. A kill counts as Ctrl-C.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        is_final = is_final_stop(number, received)
        received.append(signal.SIGINT if is_final else number)
        if is_final:
            kill()
            return
        stop(number)
        if number == signal.SIGINT:
            os.write(2, b"\nstopping after this step; Ctrl-C again ends it at once\n")  # not print: it may be printing right now

    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before: dict[int, Any] = {number: signal.signal(number, on_signal) for number in heard}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)  # what was held back until somebody listens comes now
    try:
        yield received
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
