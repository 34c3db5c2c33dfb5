"""Stop signals that come while a node program is still being started: kept for the program, instead of ending it without a word.

A batch system may send one at any time, and importing takes seconds. Who starts a node program may block them before Python begins
(`env --block-signal=USR1`); from here on none is lost.
"""

from __future__ import annotations

import signal
from types import FrameType

from ddp_train.system.process import STOP_SIGNALS

received: list[int] = []
"""What has come, until the program takes over."""


def keep() -> None:
    """Keep stop signals from now on, and let those come that were held back."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _note(number: int, frame: FrameType | None) -> None:
    received.append(number)
