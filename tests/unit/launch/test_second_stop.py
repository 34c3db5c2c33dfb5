"""Which signals end everything at once, and which let a run save."""

from __future__ import annotations

import os
import signal

import pytest

from ddp_train.launch.signals import stop_signals


@pytest.mark.parametrize(
    ("numbers", "kills"),
    [
        ([signal.SIGINT, signal.SIGINT], 1),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT], 1),
        ([signal.SIGQUIT], 1),
        ([signal.SIGTERM, signal.SIGQUIT], 1),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], 0),  # a supervisor that repeats itself
        ([signal.SIGTERM, signal.SIGINT], 0),
        ([signal.SIGINT, signal.SIGTERM], 0),  # notebook servers and supervisors escalate
        ([signal.SIGUSR1, signal.SIGTERM], 0),
        ([signal.SIGTERM, signal.SIGHUP], 0),  # systemd sends both
        ([signal.SIGHUP, signal.SIGTERM], 0),
        ([signal.SIGINT, signal.SIGHUP], 0),  # the terminal is closed while all save
    ],
)
def test_only_ctrl_c_after_ctrl_c_and_sigquit_end_all_at_once(numbers: list[int], kills: int) -> None:
    stopped, killed = list[int](), list[int]()
    with stop_signals(stopped.append, lambda: killed.append(1)):
        for number in numbers:
            os.kill(os.getpid(), number)
    assert len(killed) == kills
    assert stopped == numbers[: len(numbers) - kills]


def test_in_the_background_of_a_script_only_other_signals_stop() -> None:
    """bash starts `command &` with SIGINT and SIGQUIT ignored: they are meant for what runs in the foreground."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopped = list[int]()
    try:
        with stop_signals(stopped.append, lambda: None) as received:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped == received == [signal.SIGTERM]
