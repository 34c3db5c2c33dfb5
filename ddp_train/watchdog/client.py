"""A rank's part in the watch on hangs: every rank writes heartbeats, and local rank 0 starts the watchdog of its machine.

The watchdog is `python -m ddp_train.watchdog`. It imports no torch, and ends with the job or with local rank 0.

A heartbeat holds the phase of a rank and its begin, in a file in memory. It is written in every phase of every step: a few plain stores, no
lock and no system call. The watchdog looks only at ranks that do not move, so a half-written one does no harm.
"""

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

from ddp_train.system.phase import Phase, Phases
from ddp_train.system.process import HAS_SHARED_MEMORY, open_memory

OTHER_MACHINES = 2  # if no rank of this machine is to blame, another machine has this many time-outs to name one of its ranks
_REPORT_MARGIN_S = 60
_NAME = "ddp_train_beat"
_PHASE_FIELDS = struct.Struct("=dqqq")
_DEVICE_FIELDS = struct.Struct("=q?")  # after _PHASE_FIELDS
_ALL_FIELDS = struct.Struct("=dqqqq?")
_PHASES = (Phase.START, Phase.EVALUATION, Phase.SAVE, Phase.DATA, Phase.STEP, Phase.END)
"""The phases in their order within one step."""


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What to watch; an argument of the watchdog."""

    run_folder: str
    pids: Sequence[tuple[int, int]]  # rank and pid, of this machine's ranks
    world_size: int
    start_timeout_s: float | None  # without a heartbeat, until a rank has taken its first step; None: no limit
    step_timeout_s: float | None  # the same, after the first step
    uses_device: bool  # a GPU
    shows: bool  # a report goes to the terminal too


def start_watchdog(request: WatchRequest, terminal: TextIO) -> subprocess.Popen[bytes]:
    """Start the watchdog of this machine, which watches until its input is closed. It prints reports on the terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_train.watchdog", str(os.getpid()), json.dumps(asdict(request))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        start_new_session=True,  # an agent signals the whole group of a rank
    )


def collective_timeout(*timeouts_s: float | None) -> timedelta:
    """Return how long a collective may take: longer than the watchdog waits, or innocent ranks would fail before it names the culprit."""
    longest = max(timeout_s or math.inf for timeout_s in timeouts_s)
    return timedelta(days=1) if longest == math.inf else timedelta(seconds=OTHER_MACHINES * longest + _REPORT_MARGIN_S)


class Heartbeat(NamedTuple):
    """The phase and progress of a rank."""

    time: float  # when the phase began, in seconds of the machine's monotonic clock
    phase: Phase
    step: int  # steps taken before it
    has_taken_a_step: bool  # since this rank began
    device_step: int = -1  # steps that its device has finished, as last seen: it may have got further; -1: not known
    waits_for_device: bool = False  # the host is waiting for its device to finish one more: it has not got further

    @property
    def progress(self) -> tuple[int, int]:
        """Orders ranks: the smallest one is behind."""
        return self.step, _PHASES.index(self.phase)


def write_heartbeats(phases: Phases) -> None:
    """Write a heartbeat at each phase of a job (in a rank)."""
    descriptor = -1  # private memory, if no other process can watch
    first_step = -1  # not begun
    if HAS_SHARED_MEMORY:
        descriptor = os.memfd_create(_NAME)  # stays open: the watchdog opens it by its name
        os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    def beat(phase: Phase, step: int) -> None:
        nonlocal first_step
        if first_step < 0 and phase is Phase.DATA:
            first_step = step
        _PHASE_FIELDS.pack_into(memory, 0, time.monotonic(), step, 0 <= first_step < step, _PHASES.index(phase))

    def see_device(step: int, is_awaited: bool) -> None:
        _DEVICE_FIELDS.pack_into(memory, _PHASE_FIELDS.size, step, is_awaited)

    see_device(-1, False)
    phases.listen(beat)
    phases.listen_to_device(see_device)


class HeartbeatReader:
    """Reads the heartbeats of another process."""

    def __init__(self, pid: int) -> None:
        self._memory: mmap.mmap | None = None
        if (descriptor := open_memory(pid, _NAME)) is not None:
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
            os.close(descriptor)

    def last(self, *, since: float) -> Heartbeat:
        """Return the last heartbeat; if there is none after `since`, a start at that time."""
        if self._memory is not None:
            moment, step, has_taken_a_step, number, device_step, waits_for_device = _ALL_FIELDS.unpack_from(self._memory)
            if moment >= since:
                return Heartbeat(moment, _PHASES[number], step, bool(has_taken_a_step), device_step, waits_for_device)
        return Heartbeat(time=since, phase=Phase.START, step=0, has_taken_a_step=False)
