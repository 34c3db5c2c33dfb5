"""logs/rank_00000.log: everything that a rank says, also what C++ prints and what anybody's loggers say from INFO on.

What rank 0 prints is on the terminal too, and so are its warnings.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.redaction import Redacting
from ddp_train.system.terminal import Terminal

logger = logging.getLogger(__name__)

_IS_LINUX = sys.platform.startswith("linux")
_IOLBF = 1  # stdio.h


@contextmanager
def redirect_output(run_folder: RunFolder, rank: int, *, is_shown: bool) -> Iterator[TextIO]:
    """Send this process's output to its rank's log, and give the terminal, for the one screen that a failure shows.

    File descriptors are redirected, not only Python's streams, so that a segfault's last words and C++ warnings are kept. What C writes
    to its own stdout, as NCCL does, is there line by line: a rank that is killed, aborted or left has no time to empty a buffer.

    `is_shown`: let Python's own `print` and warnings of loggers on global rank 0 reach the terminal.
    """
    run_folder.logs.mkdir(parents=True, exist_ok=True)
    _flush()
    python_streams = sys.stdout, sys.stderr
    terminals = [Terminal(os.dup(descriptor)) for descriptor in (1, 2)]
    log = os.open(run_folder.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if _IS_LINUX:  # C's stdout, which is a file now, must not wait until its buffer is full
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    file_handler = logging.FileHandler(run_folder.rank_log(rank))
    file_handler.setFormatter(Redacting(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file_handler]
    screens: list[Terminal] = []
    if rank == 0 and is_shown:
        screens = [Terminal(terminal.fileno(), owns=False, log=descriptor) for descriptor, terminal in zip((1, 2), terminals, strict=True)]
        sys.stdout, sys.stderr = screens
        handlers.append(_ScreenHandler(screens[1]))
    our_logger = logging.getLogger("ddp_train")
    root_logger = logging.getLogger()
    level = root_logger.level
    our_logger.addHandler(file_handler)
    our_logger.setLevel(logging.INFO)
    our_logger.propagate = False  # a failure has a screen of its own
    for handler in handlers:
        root_logger.addHandler(handler)
    root_logger.setLevel(min(level, logging.INFO))
    logger.info(failure.BEGINS, os.getpid())
    try:
        yield terminals[1]
    finally:
        our_logger.removeHandler(file_handler)
        for handler in handlers:
            root_logger.removeHandler(handler)
            with suppress(OSError):  # a full disk: how the rank has ended counts
                handler.close()
        root_logger.setLevel(level)
        with suppress(OSError):
            _flush()
        sys.stdout, sys.stderr = python_streams
        for screen in screens:
            screen.close()  # a logger that kept it must not write into the file that gets its descriptor next
        for descriptor, terminal in zip((1, 2), terminals, strict=True):
            os.dup2(terminal.fileno(), descriptor)
            terminal.close()


class _ScreenHandler(logging.Handler):
    """Shows warnings on the terminal, as Python does where nobody has set up any logging."""

    def __init__(self, stream: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        self._stream.show(f"{self.format(record)}\n")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if _IS_LINUX:
        ctypes.CDLL(None).fflush(None)
