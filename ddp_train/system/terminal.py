"""Streams to a terminal that may be closed, or a pipe whose reader may end: they go quiet, and the work goes on."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice, repeat

from ddp_train.system.redaction import redact


class Terminal(io.TextIOWrapper):
    """A text stream that never raises OSError and shows no secrets. Text that it cannot show is lost; the ranks' logs have it.

    It writes to `descriptor`, which ends with it if it `owns` that; the descriptor `log` is of a log that gets a copy.
    """

    def __init__(self, descriptor: int, *, owns: bool = True, log: int | None = None) -> None:
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
            super().write(redact(text))
        except OSError:
            self._go_quiet()

    def flush(self) -> None:
        """Pass on what is buffered, if there is still a reader."""
        try:
            super().flush()
        except OSError:
            self._go_quiet()

    def _go_quiet(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # for buffered text, and all that follows
        os.close(nowhere)


_FREE = "\x1b7\x1b[r\x1b8\x1b[J"  # the whole terminal scrolls again; what is below the cursor goes


class Foot:
    """The last lines of a terminal, which stay in their place: all that any process prints scrolls above them.

    The terminal does it (its scrolling region): the text of other processes is never overwritten. `free_foot` ends it.
    """

    newest: "Foot | None" = None

    def __init__(self, descriptor: int, lines: int) -> None:
        self._descriptor, self._lines = descriptor, lines
        self._height = 0  # of the terminal, in lines, when the foot was made
        Foot.newest = self

    def draw(self, texts: Sequence[str]) -> None:
        """Show these lines, as many as there is room for, without what is too long; nothing once the foot was freed."""
        with suppress(OSError):  # the terminal was closed
            height = os.get_terminal_size(self._descriptor).lines
            size = min(self._lines, height // 3)
            # The lines above the foot scroll, and the cursor is in them.
            room = "\n" * size + f"\x1b[{size}A\x1b7\x1b[1;{height - size}r\x1b8" if size else ""
            text = "" if height == self._height else _FREE * bool(self._height) + room
            self._height = height
            rows = enumerate(islice(chain(texts, repeat("")), size), height - size + 1)
            text += "\x1b7\x1b[?7l" + "".join(f"\x1b[{row};1H\x1b[2K{line}" for row, line in rows) + "\x1b[?7h\x1b8"
            if Foot.newest is self:
                os.write(self._descriptor, redact(text).encode(errors="replace"))


def free_foot(descriptor: int) -> None:
    """Give the last lines of a terminal back, also those that a process has left that was killed; do nothing if it is no terminal."""
    Foot.newest = None
    if os.isatty(descriptor):
        with suppress(OSError):
            os.write(descriptor, _FREE.encode())


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
    """Call `protect_streams` for the block. A notebook that called us gets its own streams back afterwards."""
    streams = sys.stdout, sys.stderr
    protect_streams()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
