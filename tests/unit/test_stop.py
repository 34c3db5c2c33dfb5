"""Asking one rank to stop; what several ranks do is in tests/distributed/test_stop.py."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest

from ddp_train.distributed import alone
from ddp_train.process import STOP_SIGNALS
from ddp_train.stop import WALLTIME, Stop


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_makes_the_step_that_is_being_taken_the_last_and_closing_puts_everything_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    descriptors = len(os.listdir("/proc/self/fd"))
    stop = Stop(alone())
    stop.can_save()
    assert not stop.comes_after(1)
    os.kill(os.getpid(), number)
    assert stop.cause() == number
    assert stop.is_asked()
    assert stop.comes_after(2)
    stop.close()
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stop")]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_stops_by_itself_when_the_time_is_up() -> None:
    stop = Stop(alone(), at=time.time() + 0.2)
    stop.can_save()
    assert not stop.is_asked()
    assert stop.cause() is WALLTIME
    assert stop.comes_after(1)
    stop.close()


def test_the_signal_is_noticed_while_the_main_thread_runs_no_python() -> None:
    stop = Stop(alone())
    stop.can_save()
    noticed_after_s: list[float] = []

    def send() -> None:
        time.sleep(0.1)
        started = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.cause()
        noticed_after_s.append(time.monotonic() - started)

    sending = threading.Thread(target=send)
    sending.start()
    started = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)  # one call of C that lets other threads run, as a collective
    in_c_s = time.monotonic() - started
    sending.join()
    stop.close()
    assert noticed_after_s[0] < in_c_s / 2
