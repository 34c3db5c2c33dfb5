"""The watch on hangs, as a rank sees it: every rank beats, local rank 0 starts the process that looks at the beats of its node.

That process is `watch_process.py`. It imports no torch, lives as long as local rank 0, and serves one job after another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO

from torch.distributed import Store

from ddp_train.job import Job
from ddp_train.phase import Pulse
from ddp_train.system import shared_memory, stack_dump
from ddp_train.watchdog.__main__ import OTHER_NODES, Orders
from ddp_train.watchdog.heartbeat import Heart

_MEET_WITHIN = timedelta(minutes=5)
_REPORTS_S = 60


class Watch:
    """One rank's part in the watch on its node.

    Args:
        store: where the ranks meet.
        rank: this rank.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._size, self._heart = size, Heart()
        self._process: subprocess.Popen[str] | None = None
        self._pids: dict[int, int] = {}
        stack_dump.answer()
        store.set(f"watch/{rank}", str(os.getpid()))
        if int(os.environ["LOCAL_RANK"]) == 0 and shared_memory.IS_SUPPORTED:
            ranks = range(rank, rank + int(os.environ["LOCAL_WORLD_SIZE"]))  # torchrun counts a node's ranks one after another
            store.wait([f"watch/{each}" for each in ranks], _MEET_WITHIN)
            self._pids = {each: int(store.get(f"watch/{each}")) for each in ranks}

    def begin(self, job: Job, pulse: Pulse, *, uses_device: bool, terminal: TextIO) -> None:
        """Watch a job that begins.

        Args:
            terminal: where a report is shown.
        """
        self._heart.follow(pulse)
        if self._pids:
            if self._process is None:
                self._process = _start(terminal)
            cluster = job.config.tree["cluster"]
            self._tell(
                Orders(
                    pids=self._pids,
                    world_size=self._size,
                    run_dir=str(job.run_dir.root),
                    start_timeout_s=cluster["start_timeout_s"],
                    step_timeout_s=cluster["step_timeout_s"],
                    uses_device=uses_device,
                    shows=not job.in_sweep,
                ).to_json()
            )

    def end(self) -> None:
        """Stop watching: the job is over."""
        self._tell("")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # somebody has ended it
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()


def patience(cluster: Mapping[str, Any]) -> timedelta:
    """Return how long a collective may take: longer than the watch waits, else the innocent ranks would give up before it has found out."""
    longest = [cluster[key] for key in ("start_timeout_s", "step_timeout_s")]
    return timedelta(days=1) if None in longest else timedelta(seconds=OTHER_NODES * max(longest) + _REPORTS_S)


def _start(terminal: TextIO) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_train.watchdog.__main__", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        text=True,
        start_new_session=True,  # an agent signals the whole group of a rank
    )
