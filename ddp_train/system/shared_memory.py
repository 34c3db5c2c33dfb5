"""Files in memory that another process of the same user finds by its pid and their name (Linux).

Nothing of them is in any folder, so nothing is left behind however their process ends.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ddp_train.system.process import open_files

IS_SUPPORTED = hasattr(os, "memfd_create") and any(open_files(os.getpid()))


def create(name: str) -> int:
    """Return the descriptor of a new, empty file. Started programs do not inherit it."""
    return os.memfd_create(name)


def open_of(pid: int, name: str) -> int | None:
    """Return a descriptor to read another process's file with; None: it has none of that name, or has ended."""
    for path, file in open_files(pid):
        if file.startswith(f"/memfd:{name} "):
            with suppress(OSError):  # closed meanwhile
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
