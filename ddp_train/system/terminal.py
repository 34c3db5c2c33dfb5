"""Streams to a terminal that may be closed, or a pipe whose reader may end: they go quiet, and the work goes on."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ddp_train.errors import FAILED
from ddp_train.system.redaction import redact


class Terminal(io.TextIOWrapper):
    """A text stream that never raises OSError and shows no secrets. Text that it cannot show is lost; the ranks' logs have it.

    It writes to `descriptor`, which ends with it if it `owns` that; the descriptor `log` is of a log that gets a copy.
    """

    def __init__(self, descriptor: int, *, owns: bool = True, log: int | None = None) -> None:
        self.screen: TextIO | None = None  # shows the text instead, above a progress line
        self._log = log
        binary = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=owns))
        super().__init__(binary, errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        """Write text, if there is still a reader."""
        if self._log is not None:
            with suppress(OSError):  # a full disk
                os.write(self._log, redact(text).encode(errors="backslashreplace"))
        self.show(text)
        return len(text)

    def show(self, text: str) -> None:
        """Write text, but not into the log."""
        try:
            if self.screen is not None:
                self.screen.write(text)
            else:
                super().write(redact(text))
        except OSError:
            self._go_quiet()

    def flush(self) -> None:
        """Pass on what is buffered, if there is still a reader."""
        try:
            if self.screen is not None:
                self.screen.flush()
            super().flush()
        except OSError:
            self._go_quiet()

    def _go_quiet(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # for buffered text, and all that follows
        os.close(nowhere)


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that the caller has closed (`>&-`): the next file that is opened would get their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, which is this one


def protect_streams() -> None:
    """Replace the standard streams, so that this process survives its terminal and shows no secrets."""
    sys.stdout, sys.stderr = Terminal(1, owns=False), Terminal(2, owns=False)


@contextmanager
def protected_streams() -> Iterator[None]:
    """Call `protect_streams` for the block, and show its errors there. A notebook that called us gets its own streams back afterwards."""
    streams = sys.stdout, sys.stderr
    protect_streams()
    try:
        yield
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(FAILED)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
