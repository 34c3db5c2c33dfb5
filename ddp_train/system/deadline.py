"""Polling: ask again and again until the answer is yes or the time is over."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], *, within_s: float, every_s: float, first_s: float | None = None) -> bool:
    """Ask until the answer is yes; tell whether it was in time. It is asked once at least.

    Reports of a failure or a hang show the caller's line, which says what it waits for, not this one.

    It waits `every_s` between two checks. For a condition that is usually true soon `first_s` is the first wait, doubled up to `every_s`.
    """
    deadline = time.monotonic() + within_s
    wait_s = every_s if first_s is None else first_s
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, every_s)
    return True
