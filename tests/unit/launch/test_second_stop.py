"""Which stop signals end everything at once."""

from __future__ import annotations

import os
import signal

import pytest

from ddp_train.launch.signals import stop_signals


@pytest.mark.parametrize(
    ("numbers", "kills"),
    [
        ([signal.SIGINT, signal.SIGINT], 1),
        ([signal.SIGTERM, signal.SIGINT], 1),
        ([signal.SIGUSR1, signal.SIGTERM], 0),
        ([signal.SIGTERM, signal.SIGHUP], 0),  # systemd sends both
        ([signal.SIGHUP, signal.SIGTERM], 0),
        ([signal.SIGINT, signal.SIGHUP], 0),  # the terminal is closed while all save
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGTERM], 1),
    ],
)
def test_the_second_stop_ends_all_at_once_and_what_comes_beside_it_does_not(numbers: list[int], kills: int) -> None:
    stopped, killed = list[int](), list[int]()
    with stop_signals(stopped.append, lambda: killed.append(1)):
        for number in numbers:
            os.kill(os.getpid(), number)
    assert len(killed) == kills
    assert stopped == numbers[: len(numbers) - kills]
