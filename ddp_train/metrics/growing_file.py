"""A file that lines are added to; they wait in memory while the disk is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ddp_train.system.files import write_atomic


class GrowingFile:
    """Appends lines to a file, each at once or as soon as there is space again.

    Args:
        path: what lies there goes on, without the lines that `keeps` refuses.
    """

    def __init__(self, path: Path, *, keeps: Callable[[str], bool]) -> None:
        self._path = path
        if path.exists():
            write_atomic(path, "".join(f"{line}\n" for line in path.read_text().splitlines() if keeps(line)))
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._is_late = False

    def append(self, line: str) -> None:
        """Add one line."""
        self._waiting += f"{line}\n".encode()
        try:
            self._flush()
        except OSError as error:
            if not self._is_late:
                print(f"{self._path.name} cannot be written ({error.strerror}); training goes on, its lines wait in memory", flush=True)
            self._is_late = True
        else:
            if self._is_late:
                print(f"{self._path.name} is complete again", flush=True)
            self._is_late = False

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines are waiting, and there is no space for them still.
        """
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        while self._waiting:
            written = os.write(self._file.fileno(), self._waiting)  # where little space is left, a part of it
            self._waiting = self._waiting[written:]
