"""The watch on hangs, as a rank sees it: every rank beats, local rank 0 starts the process that looks at the beats of its node.

That process is `python -m ddp_train.watchdog`. It imports no torch, lives as long as local rank 0, and serves one job after another.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, TextIO

from ddp_train.phase import PhaseTracker
from ddp_train.watchdog.heartbeat import HeartbeatWriter

OTHER_NODES = 2
"""Where nobody on this node is to blame, another node has this many time-outs to name somebody."""

_REPORTS_S = 60


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What to watch; a line on the standard input of that process."""

    run_folder: str
    start_timeout_s: float | None  # without a beat, until a rank has taken its first step; None: as long as it takes
    step_timeout_s: float | None  # the same, after it
    uses_device: bool  # a GPU
    shows: bool  # a report goes to the terminal too
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid, of this node
    world_size: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WatchRequest:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "pids": {int(rank): pid for rank, pid in fields["pids"].items()}})


class WatchdogClient:
    """One rank's part in the watch on its node.

    Args:
        world_size: how many ranks there are.
    """

    pids: dict[int, int]
    """On local rank 0: rank -> pid, of all ranks of this node. Empty on the others, and where nobody can watch."""

    def __init__(self, world_size: int) -> None:
        self.pids, self._world_size, self._heartbeat = {}, world_size, HeartbeatWriter()
        self._process: subprocess.Popen[str] | None = None

    def begin(self, tracker: PhaseTracker, request: WatchRequest, *, terminal: TextIO) -> None:
        """Watch a job that begins.

        Args:
            terminal: where a report is shown.
        """
        self._heartbeat.follow(tracker)
        if self.pids:
            if self._process is None:
                self._process = _start(terminal)
            self._tell(replace(request, pids=self.pids, world_size=self._world_size).to_json())

    def end(self) -> None:
        """Stop watching: the job is over."""
        self._tell("")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # somebody has ended it
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()


def patience(*timeouts_s: float | None) -> timedelta:
    """Return how long a collective may take: longer than the watch waits, else the innocent ranks would give up before it has found out."""
    longest = max((timeout_s or math.inf for timeout_s in timeouts_s), default=math.inf)
    return timedelta(days=1) if longest == math.inf else timedelta(seconds=OTHER_NODES * longest + _REPORTS_S)


def _start(terminal: TextIO) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_train.watchdog", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        text=True,
        start_new_session=True,  # an agent signals the whole group of a rank
    )
