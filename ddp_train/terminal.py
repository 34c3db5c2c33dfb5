"""Streams to a terminal that may be closed, or to a pipe that nobody reads any more: then they go quiet, and the work goes on."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_train.redaction import redact


class Terminal(io.TextIOWrapper):
    """A text stream that never raises OSError and shows no secrets. What it cannot show is lost; the logs of the ranks have it.

    Args:
        descriptor: where it writes.
        owns: close the descriptor with the stream.
    """

    def __init__(self, descriptor: int, *, owns: bool = True) -> None:
        binary = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=owns))
        super().__init__(binary, errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        """Write text, if there is still somebody to read it."""
        try:
            super().write(redact(text))
            return len(text)
        except OSError:
            self._go_quiet()
            return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, if there is still somebody to read it."""
        try:
            super().flush()
        except OSError:
            self._go_quiet()

    def _go_quiet(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # for what is buffered, and all that comes
        os.close(nowhere)


def outlive() -> None:
    """Let this process outlive its terminal."""
    sys.stdout, sys.stderr = Terminal(1, owns=False), Terminal(2, owns=False)


@contextmanager
def outlived() -> Iterator[None]:
    """Let this process outlive its terminal while the block runs. A notebook that called us has its own streams back afterwards."""
    before = sys.stdout, sys.stderr
    outlive()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
