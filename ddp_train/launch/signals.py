"""Stop signals of a typed command: they let everything save and end; a second Ctrl-C or SIGQUIT ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ddp_train.system.process import STOP_SIGNALS

LISTENED = (*STOP_SIGNALS, signal.SIGQUIT)


def is_final_stop(number: int, earlier: Sequence[int]) -> bool:
    """Tell whether a signal ends everything at once, without saving: SIGQUIT, or Ctrl-C after Ctrl-C.

    Programs send the others, and often several: systemd SIGTERM with SIGHUP, a batch system SIGTERM to a step and to its task, a
    supervisor SIGTERM after Ctrl-C. A run that is saving must outlive those.
    """
    return number == signal.SIGQUIT or (number == signal.SIGINT and signal.SIGINT in earlier)


def announce_stop(number: int) -> None:
    """Write what the first stop signal does, and how to stop at once. Not by print: the signal may have interrupted one."""
    again = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C twice"
    with suppress(OSError):  # the terminal is closed: why it stops
        os.write(2, f"\nstopping after this step; {again}, or SIGQUIT (Ctrl-\\), stops at once\n".encode())


@contextmanager
def handling_signals(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[list[int]]:
    """Handle signals while the block runs, except those that are ignored (nohup ignores SIGHUP); give the numbers of those it handles."""
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may, and none other is interrupted
    handlers_before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers if is_main}
    handled = [number for number, handler_before in handlers_before.items() if handler_before != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield handled
    finally:
        for number in handled:
            signal.signal(number, handlers_before[number])


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Let stop signals wait until the block is over; programs that it starts and waits for do not get them either."""
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # which the programs inherit; another thread may still take one
    try:
        with handling_signals(STOP_SIGNALS, lambda number, frame: came.append(number)):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in came:
            signal.raise_signal(number)


@contextmanager
def stop_signals(stop: Callable[[int], None], kill: Callable[[], None]) -> Iterator[list[int]]:
    """Pass stop signals on while the block runs, and give the list of those that came.

    `kill` ends everything at once (`is_final_stop`), and counts as Ctrl-C.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        is_first, is_final = not received, is_final_stop(number, received)
        received.append(signal.SIGINT if is_final else number)
        if is_final:
            kill()
            return
        stop(number)
        if is_first:
            announce_stop(number)

    with handling_signals(LISTENED, on_signal) as handled:
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # what was held back comes now
        try:
            yield received
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


early_stops: list[int] = []  # stop signals that came while a node program was still being started; the program takes them over


def keep_early_stops() -> None:
    """Keep stop signals for the node program, which would end it without a word while it imports.

    A batch system may send one at any time. Who starts a node program may block them before Python begins (`env --block-signal=USR1`).
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: early_stops.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
