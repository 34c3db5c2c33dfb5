"""torch's record of a rank's last collectives under NCCL, written before a hang is ended. Imports no torch.

torch writes it when NCCL times out, which is later than our watch on hangs, or after a write into a named pipe of the rank: torch's monitor
thread looks once a second. We remove the pipe's name, so that none is left behind.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddp_train.system.deadline import wait_until
from ddp_train.system.process import open_files

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
