"""What the C library does with memory that this process frees."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = (1 << 30, 32 << 20)  # bytes; an older glibc takes no more than the second


def keep_freed(environment: Mapping[str, str]) -> None:
    """Let freed memory stay with this process, for the next tensor of that size.

    As it is, glibc gives large blocks back to the kernel at once and asks for them again: a training step on a CPU then spends a tenth to a
    fifth of its time in page faults. The process takes no more than it had at most before. Nothing happens where somebody has set this
    already, in whatever way, or where the C library is another one.
    """
    if any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        if any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST):
            mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
