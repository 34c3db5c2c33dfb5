"""logs/rank_00000.log: everything that a rank says, also what C++ prints."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ddp_train import failure
from ddp_train.redaction import redact_code
from ddp_train.run_dir import RunDir
from ddp_train.terminal import Terminal

logger = logging.getLogger(__name__)


class Redacting(logging.Formatter):
    """Formats records, their tracebacks too, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        return redact_code(super().format(record))


@contextmanager
def rank_log(run_dir: RunDir, rank: int, *, shows: bool) -> Iterator[TextIO]:
    """Send this process's output to its rank's log, and give the terminal, for the one screen that a failure shows.

    File descriptors are redirected, not only Python's streams, so that a segfault's last words and C++ warnings are kept.

    Args:
        shows: let Python's own `print` on global rank 0 reach the terminal.
    """
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    _flush()
    python_streams = sys.stdout, sys.stderr
    terminals = [Terminal(os.dup(descriptor)) for descriptor in (1, 2)]
    log = os.open(run_dir.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if rank == 0 and shows:
        sys.stdout, sys.stderr = terminals
    root = logging.getLogger("ddp_train")
    handler = logging.FileHandler(run_dir.rank_log(rank))
    handler.setFormatter(Redacting(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    logger.info(failure.begins())
    try:
        yield terminals[1]
    finally:
        root.removeHandler(handler)
        handler.close()
        _flush()
        sys.stdout, sys.stderr = python_streams
        for descriptor, terminal in zip((1, 2), terminals, strict=True):
            os.dup2(terminal.fileno(), descriptor)
            terminal.close()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
