"""A file that lines are added to; they wait in memory while the disk is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ddp_train.system.files import write_atomic


class GrowingFile:
    """Appends lines to a file, each at once or as soon as there is space again.

    Args:
        path: what lies there goes on, without the lines that `keeps` refuses.
    """

    def __init__(self, path: Path, *, keeps: Callable[[str], bool]) -> None:
        self._path, self._keeps = path, keeps
        self._file: BinaryIO | None = None
        self._waiting = b""
        self._is_late = False
        self._write_waiting()

    def append(self, line: str) -> None:
        """Add one line."""
        self._waiting += f"{line}\n".encode()
        self._write_waiting()

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines are waiting, and there is no space for them still.
        """
        self._flush().close()

    def _write_waiting(self) -> None:
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

    def _flush(self) -> BinaryIO:
        if self._file is None:
            self._file = self._open()
        while self._waiting:
            written = os.write(self._file.fileno(), self._waiting)  # where little space is left, a part of it
            self._waiting = self._waiting[written:]
        return self._file

    def _open(self) -> BinaryIO:
        text = self._path.read_text() if self._path.exists() else ""
        if (kept := "".join(f"{line}\n" for line in text.splitlines() if self._keeps(line))) != text:
            write_atomic(self._path, kept)
        return self._path.open("ab", buffering=0)
