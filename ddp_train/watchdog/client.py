"""The watch on hangs, as a rank sees it: every rank beats, local rank 0 starts the process that looks at the beats of its node.

That process is `python -m ddp_train.watchdog`. It imports no torch, and ends with the job or with local rank 0.

A beat says what a rank is at and since when, in a file in memory. It is written in every phase of every step: a few plain stores, no lock
and no system call. The watch looks at ranks that do not move, so it does no harm when it meets one half written.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple, TextIO

from ddp_train.system.phase import Phase, PhaseTracker
from ddp_train.system.process import HAS_SHARED_MEMORY, open_memory

OTHER_NODES = 2  # where no rank of this node is to blame, another node has this many time-outs to name one of its own
_REPORTS_S = 60
_NAME = "ddp_train_beat"
_LAYOUT = struct.Struct("=dqqq")
_DEVICE = struct.Struct("=q?")  # behind it
_BOTH = struct.Struct("=dqqqq?")
_PHASES = (Phase.START, Phase.EVALUATION, Phase.SAVE, Phase.DATA, Phase.STEP, Phase.END)
"""In the order in which those with the same number of steps behind them come."""


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What to watch; an argument of that process."""

    run_folder: str
    pids: Sequence[tuple[int, int]]  # rank and pid, of this node's ranks
    world_size: int
    start_timeout_s: float | None  # without a beat, until a rank has taken its first step; None: as long as it takes
    step_timeout_s: float | None  # the same, after it
    uses_device: bool  # a GPU
    shows: bool  # a report goes to the terminal too


def start_watchdog(request: WatchRequest, terminal: TextIO) -> subprocess.Popen[bytes]:
    """Start the process that watches the ranks of this node until its input is closed. A report is shown on the terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_train.watchdog", str(os.getpid()), json.dumps(asdict(request))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        start_new_session=True,  # an agent signals the whole group of a rank
    )


def patience(*timeouts_s: float | None) -> timedelta:
    """Return how long a collective may take: longer than the watch waits, else the innocent ranks would give up before it has found out."""
    longest = max(timeout_s or math.inf for timeout_s in timeouts_s)
    return timedelta(days=1) if longest == math.inf else timedelta(seconds=OTHER_NODES * longest + _REPORTS_S)


class Heartbeat(NamedTuple):
    """What a rank is at."""

    time: float  # when that began, in seconds of the machine's monotonic clock
    phase: Phase
    step: int  # steps taken before it
    has_taken_a_step: bool  # since this rank began
    device_step: int = -1  # steps that its device has finished, as last seen: it may have got further; -1: not known
    waits_for_device: bool = False  # the host waits right now for its device to finish one more: it has not got further

    @property
    def progress(self) -> tuple[int, int]:
        """What tells who is behind."""
        return self.step, _PHASES.index(self.phase)


def write_heartbeats(tracker: PhaseTracker) -> None:
    """Beat with each phase of a job (in a rank)."""
    descriptor, first_step = -1, -1  # memory of its own, where no other process can watch; where this rank began, if it has
    if HAS_SHARED_MEMORY:
        descriptor = os.memfd_create(_NAME)  # stays open: the watch opens it by its name
        os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    def beat(phase: Phase, step: int) -> None:
        nonlocal first_step
        if first_step < 0 and phase is Phase.DATA:
            first_step = step
        _LAYOUT.pack_into(memory, 0, time.monotonic(), step, 0 <= first_step < step, _PHASES.index(phase))

    def see_device(step: int, is_awaited: bool) -> None:
        _DEVICE.pack_into(memory, _LAYOUT.size, step, is_awaited)

    see_device(-1, False)
    tracker.listen(beat)
    tracker.listen_to_device(see_device)


class HeartbeatReader:
    """The beats of another process, as the watch sees them."""

    def __init__(self, pid: int) -> None:
        self._memory: mmap.mmap | None = None
        if (descriptor := open_memory(pid, _NAME)) is not None:
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
            os.close(descriptor)

    def last(self, *, since: float) -> Heartbeat:
        """Return the last one; where there is none since `since`, a start at that time."""
        if self._memory is not None:
            moment, step, has_taken_a_step, number, device_step, waits_for_device = _BOTH.unpack_from(self._memory)
            if moment >= since:
                return Heartbeat(moment, _PHASES[number], step, bool(has_taken_a_step), device_step, waits_for_device)
        return Heartbeat(time=since, phase=Phase.START, step=0, has_taken_a_step=False)
