"""Ties between processes: nothing of ours outlives the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ask a run to stop in good order. Batch systems send SIGUSR1 some time before the end (`sbatch --signal=USR1@120`), a terminal that is
closed sends SIGHUP."""

AGENT_VARIABLE = "DDP_TRAIN_AGENT"
"""The environment variable in which the processes of an agent of ours find its pid: it may be gone when they have imported torch."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent is gone (Linux; elsewhere it does nothing).

    A killed agent cannot tell its ranks, and a torchrun agent that is killed otherwise leaves them training for ever.

    Args:
        parent: its pid, where the caller knows it: the parent may be gone already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died between the two lines
        os.kill(os.getpid(), signal.SIGKILL)
