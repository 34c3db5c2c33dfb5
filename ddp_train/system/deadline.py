"""Waiting for what nobody tells: asked again and again, until it is so or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], *, within_s: float, every_s: float) -> bool:
    """Ask until the answer is yes; tell whether it was in time. It is asked once at least.

    Who waits, and for what, is the caller's: reports of a failure or a hang show its line, not this one's.
    """
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True
