"""A rank's part in the watch on hangs: every rank writes heartbeats, and local rank 0 starts the watchdog of its machine.

The watchdog is `python -m ddp_train.watchdog`. It imports no torch, and ends with the job or with local rank 0.

torch's record of a rank's last collectives under NCCL is written before a hang is ended (`FlightRecorder`). torch writes it when NCCL times
out, which is later than our watch on hangs, or after a write into a named pipe of the rank: torch's monitor thread looks once a second.
We remove the pipe's name, so that none is left behind.

A heartbeat holds the phase of a rank and its begin, in a file in memory. It is written in every phase of every step: a few plain stores, no
lock and no system call. The watchdog looks only at ranks that do not move, so a half-written one does no harm.
"""

import json
import math
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TextIO

from ddp_train.system.deadline import wait_until
from ddp_train.system.phase import Phase, Phases
from ddp_train.system.process import HAS_SHARED_MEMORY, open_files, open_memory

OTHER_MACHINES = 2  # if no rank of this machine is to blame, another machine has this many time-outs to name one of its ranks
_REPORT_MARGIN_S = 60
_NAME = "ddp_train_beat"
_PHASE_FIELDS = struct.Struct("=dqqq")
_DEVICE_FIELDS = struct.Struct("=q?")  # after _PHASE_FIELDS
_ALL_FIELDS = struct.Struct("=dqqqq?")
_PHASES = (Phase.START, Phase.EVALUATION, Phase.SAVE, Phase.DATA, Phase.STEP, Phase.END)
"""The phases in their order within one step."""
_FILE = "flight_recorder_rank_"  # torch adds the rank, here and to the pipe
_PIPE = "ddp_train_flight_recorder_"
_SETTINGS = (  # each with its older names: a user who has set one of them keeps it
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",),
    ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",),
)
_COLLECTIVES = "2000"  # a few MB of host memory
_POLL_S = 0.05
_OPENS_WITHIN_S = 2.0
_WRITES_WITHIN_S = 5.0  # torch looks at the pipe once a second, and takes its time to name the lines of code


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What to watch; an argument of the watchdog."""

    run_folder: str
    pids: Sequence[tuple[int, int]]  # rank and pid, of this machine's ranks
    world_size: int
    start_timeout_s: float | None  # without a heartbeat, until a rank has taken its first step; None: no limit
    step_timeout_s: float | None  # the same, after the first step
    uses_device: bool  # a GPU
    is_shown: bool  # a report goes to the terminal too


@contextmanager
def watched(request: WatchRequest | None, terminal: TextIO) -> Iterator[None]:
    """Run the watchdog of this machine, which prints reports on the terminal; None: another rank runs it.

    It watches until its input is closed: after an exception until this process ends.
    """
    if request is None:
        yield
        return
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "ddp_train.watchdog", str(os.getpid()), json.dumps(asdict(request))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        start_new_session=True,  # an agent signals the whole group of a rank
    )
    yield
    assert watchdog.stdin is not None
    watchdog.stdin.close()


def collective_timeout(*timeouts_s: float | None) -> timedelta:
    """Return how long a collective may take: longer than the watchdog waits, or innocent ranks would fail before it names the culprit."""
    longest = max(timeout_s or math.inf for timeout_s in timeouts_s)
    return timedelta(days=1) if longest == math.inf else timedelta(seconds=OTHER_MACHINES * longest + _REPORT_MARGIN_S)


class Heartbeat(NamedTuple):
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


def without_records(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make torch keep no record of collectives, for ranks on the CPU.

    gloo does not need the record, and for each one torch walks through all Python frames: in steps of four milliseconds that is 4 % of the
    time. Empty if the user has set how many are kept.
    """
    return {} if any(name in environment for name in _SETTINGS[0]) else {_SETTINGS[0][0]: "0"}


class FlightRecorder:
    """One rank's recorder; made before its process group opens. torch writes into the folder of the logs."""

    def __init__(self, rank: int, logs: Path) -> None:
        self._rank, self._pipes = rank, Path(tempfile.mkdtemp(prefix="ddp_train_"))
        settings = {
            "TORCH_FR_BUFFER_SIZE": _COLLECTIVES,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": _COLLECTIVES,  # older versions of torch make the pipe only with this one
            "TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / _FILE),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # without it torch looks at the pipe every eight minutes
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._pipes / _PIPE),
        }
        set_by_user = {name for names in _SETTINGS for name in names if any(alias in os.environ for alias in names)}
        self.environment = {name: value for name, value in settings.items() if name not in set_by_user}

    def hide_pipe(self, *, is_expected: bool) -> None:
        """Remove the name of the pipe as soon as torch has it open; the watchdog finds it among the open files of this process.

        `is_expected`: there is a process group, which opens one.
        """
        if is_expected and not wait_until(
            lambda: _pipe(os.getpid(), self._rank) is not None, within_s=_OPENS_WITHIN_S, every_s=_POLL_S / 5
        ):
            return  # the name stays: torch ends a process that cannot make its pipe
        shutil.rmtree(self._pipes, ignore_errors=True)


class RecordRequest:
    """Asks ranks of this machine (-> pid) to write their records into the folder of the logs.

    A rank without a pipe is left out: on the CPU, or if the user has set another pipe.
    """

    def __init__(self, pids: Mapping[int, int], logs: Path) -> None:
        self._before = {}  # file -> its size and time of writing, perhaps by an earlier attempt
        for rank, pid in pids.items():
            if (pipe := _pipe(pid, rank)) is not None:
                self._before[logs / f"{_FILE}{rank}"] = _written(logs / f"{_FILE}{rank}")
                with suppress(OSError):  # it has just ended
                    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    os.write(descriptor, b"1")
                    os.close(descriptor)
        self.has_ranks = bool(self._before)  # whether any rank will write one

    def wait(self) -> None:
        """Wait until all records are written, for a limited time."""
        now: dict[Path, tuple[int, int]] = {}

        def are_written() -> bool:
            nonlocal now
            before, now = now, {file: _written(file) for file in self._before}
            return now == before and all(size > 0 and (size, when) != self._before[file] for file, (size, when) in now.items())

        wait_until(are_written, within_s=_WRITES_WITHIN_S, every_s=2 * _POLL_S)


def _written(file: Path) -> tuple[int, int]:
    """Return the size of a file and its time of writing; zeros: there is none."""
    try:
        facts = file.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def _pipe(pid: int, rank: int) -> str | None:
    """Return a path that opens the pipe of a rank; None: it has none."""
    names = (f"{_PIPE}{rank}.pipe", f"{_PIPE}{rank}.pipe (deleted)")
    return next((path for path, file in open_files(pid) if os.path.basename(file) in names), None)
