"""logs/rank_00000.log: everything that a rank says, also what C++ prints."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from ddp_train.run_dir import RunDir


def open_rank_log(run_dir: RunDir, rank: int) -> TextIO:
    """Send this process's output to its rank's log and return the terminal, for the one screen that a failure shows.

    File descriptors are redirected, not only Python's streams, so that a segfault's last words and C++ warnings are kept. On global
    rank 0 Python's own `print` still reaches the terminal.
    """
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = _terminals()
    log = os.open(run_dir.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if rank == 0:
        sys.stdout, sys.stderr = stdout, stderr
    root = logging.getLogger("ddp_train")
    for earlier in root.handlers[:]:  # of the job before, in a sweep under torchrun
        root.removeHandler(earlier)
        earlier.close()
    handler = logging.FileHandler(run_dir.rank_log(rank))
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    return stderr


_saved: list[TextIO] = []


def _terminals() -> tuple[TextIO, TextIO]:
    """Return streams to where stdout and stderr went when the process began."""
    if not _saved:
        _saved.extend(os.fdopen(os.dup(descriptor), "w", buffering=1) for descriptor in (1, 2))
    return _saved[0], _saved[1]
