"""A stop signal that was held back before this process listened (`env --block-signal`) is not lost and ends nothing raw."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ddp_train.launch.signals import stop_signals
from ddp_train.system.process import fork


@pytest.fixture(autouse=True)
def held_back() -> Iterator[None]:
    """Hold a SIGUSR1 back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.raise_signal(signal.SIGUSR1)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_it_comes_when_somebody_listens_and_not_when_a_process_is_forked() -> None:
    told: list[int] = []
    assert fork(lambda: 7).wait() == 7
    with stop_signals(told.append, lambda: None) as received:
        pass
    assert told == received == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)  # held back again
    with stop_signals(told.append, lambda: None):
        assert len(told) == 2
