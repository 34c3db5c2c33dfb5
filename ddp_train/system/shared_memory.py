"""Files in memory that another process of the same user finds by its pid and their name (Linux).

Nothing of them is in any folder, so nothing is left behind however their process ends.
"""

from __future__ import annotations

import os
from contextlib import suppress

IS_SUPPORTED = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def create(name: str) -> int:
    """Return the descriptor of a new, empty file. Started programs do not inherit it."""
    return os.memfd_create(name)


def open_of(pid: int, name: str) -> int | None:
    """Return a descriptor to read another process's file with; None: it has none of that name, or has ended."""
    with suppress(OSError):
        for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{name} "):
                    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    return None
