"""A rank's sign of life: what it is at and since when, in a file in memory that the watch of its node looks at.

Written in every phase of every step: a few plain stores, no lock and no system call. The watch looks at ranks that do not move, so it
does no harm when it meets one half written.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

from ddp_train.phase import Phase, PhaseTracker
from ddp_train.system.process import HAS_SHARED_MEMORY, open_memory

_NAME = "ddp_train_beat"
_LAYOUT = struct.Struct("=dqqq")
_DEVICE = struct.Struct("=q?")  # behind it
_PHASES = (Phase.START, Phase.EVALUATION, Phase.SAVE, Phase.DATA, Phase.STEP, Phase.END)
"""In the order in which those with the same number of steps behind them come."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank is at."""

    time: float  # when that began, in seconds of the machine's monotonic clock
    phase: Phase
    step: int  # steps taken before it
    first_step: int  # where this rank began; -1: it has not yet
    device_step: int = -1  # steps that its device has finished, as last seen: it may have got further; -1: nobody has looked
    waits_for_device: bool = False  # the host waits right now for its device to finish one more: it has not got further

    @property
    def has_taken_a_step(self) -> bool:
        return 0 <= self.first_step < self.step

    @property
    def progress(self) -> tuple[int, int]:
        """What tells who is behind."""
        return self.step, _PHASES.index(self.phase)


class HeartbeatWriter:
    """Beats with each phase of one job after another (in a rank)."""

    def __init__(self) -> None:
        descriptor = -1  # memory of its own, where nobody can watch
        if HAS_SHARED_MEMORY:
            descriptor = os.memfd_create(_NAME)  # stays open: the watch opens it by its name
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._first_step = -1

    def follow(self, tracker: PhaseTracker) -> None:
        """Beat with the phases of a job that begins."""
        self._first_step = -1
        self._see_device(-1, False)
        tracker.listen(self._beat)
        tracker.listen_to_device(self._see_device)

    def _beat(self, phase: Phase, step: int) -> None:
        if self._first_step < 0 and phase is Phase.DATA:
            self._first_step = step
        _LAYOUT.pack_into(self._memory, 0, time.monotonic(), step, self._first_step, _PHASES.index(phase))

    def _see_device(self, step: int, is_awaited: bool) -> None:
        _DEVICE.pack_into(self._memory, _LAYOUT.size, step, is_awaited)


class HeartbeatReader:
    """The beats of another process, as the watch sees them."""

    def __init__(self, pid: int) -> None:
        self._memory: mmap.mmap | None = None
        if (descriptor := open_memory(pid, _NAME)) is not None:
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
            os.close(descriptor)

    def last(self, *, since: float) -> Heartbeat:
        """Return the last one; one from before `since` is of another job, and counts as a start at that time."""
        if self._memory is not None:
            moment, step, first_step, number = _LAYOUT.unpack_from(self._memory)
            if moment >= since:
                device_step, is_awaited = _DEVICE.unpack_from(self._memory, _LAYOUT.size)
                return Heartbeat(
                    time=moment,
                    phase=_PHASES[number],
                    step=step,
                    first_step=first_step,
                    device_step=device_step,
                    waits_for_device=is_awaited,
                )
        return Heartbeat(time=since, phase=Phase.START, step=0, first_step=-1)
