"""torch's record of a rank's last collectives under NCCL, asked for before a hang is ended. Imports no torch.

torch writes it by itself when NCCL times out, which is later than the watch on hangs, or after a write into a named pipe of the
rank's: its monitor thread looks once a second. The pipe has no name that could be left behind.
"""

from __future__ import annotations

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


def without_records(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which torch keeps no record of each collective, for ranks on the CPU.

    Under gloo nothing asks for it, and with each torch walks through all frames of Python: in steps of four milliseconds that is 4 % of
    the time. Empty where the user has set how many are kept.
    """
    return {} if any(name in given for name in _SETTINGS[0]) else {_SETTINGS[0][0]: "0"}


class FlightRecorder:
    """One rank's recorder; made before its process group opens. Torch writes into the folder of the logs."""

    def __init__(self, rank: int, logs: Path) -> None:
        self._rank, self._pipes = rank, Path(tempfile.mkdtemp(prefix="ddp_train_"))
        ours = {
            "TORCH_FR_BUFFER_SIZE": _COLLECTIVES,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": _COLLECTIVES,  # older versions of torch make the pipe only where they find this one
            "TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / _FILE),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # without it the pipe is looked at every eight minutes
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._pipes / _PIPE),
        }
        taken = {name for names in _SETTINGS for name in names if any(each in os.environ for each in names)}
        self.environment = {name: value for name, value in ours.items() if name not in taken}

    def hide_pipe(self, *, is_expected: bool) -> None:
        """Remove the name of the pipe as soon as torch has it open; the watch finds it among the open files of this process.

        It `is_expected` where there is a process group.
        """
        if is_expected and not wait_until(
            lambda: _pipe(os.getpid(), self._rank) is not None, within_s=_OPENS_WITHIN_S, every_s=_POLL_S / 5
        ):
            return  # the name stays: torch ends a process that cannot make its pipe
        shutil.rmtree(self._pipes, ignore_errors=True)


class Request:
    """Asks ranks of this machine (-> pid) for their records, which will be in the folder of the logs.

    A rank without a pipe is left out: on the CPU, or where the user has set another.
    """

    def __init__(self, pids: Mapping[int, int], logs: Path) -> None:
        self._before = {}  # file -> its size and when it was written, by an earlier attempt perhaps
        for rank, pid in pids.items():
            if (pipe := _pipe(pid, rank)) is not None:
                self._before[logs / f"{_FILE}{rank}"] = _written(logs / f"{_FILE}{rank}")
                with suppress(OSError):  # it has just ended
                    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    os.write(descriptor, b"1")
                    os.close(descriptor)
        self.is_heard = bool(self._before)  # any rank will answer

    def wait(self) -> None:
        """Wait until all have been written, or as long as it may take."""
        now: dict[Path, tuple[int, int]] = {}

        def are_written() -> bool:
            nonlocal now
            before, now = now, {file: _written(file) for file in self._before}
            return now == before and all(size > 0 and (size, when) != self._before[file] for file, (size, when) in now.items())

        wait_until(are_written, within_s=_WRITES_WITHIN_S, every_s=2 * _POLL_S)


def _written(file: Path) -> tuple[int, int]:
    """Return how long a file is and when it was written last; zeros for none."""
    try:
        facts = file.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def _pipe(pid: int, rank: int) -> str | None:
    """Return where the pipe of a rank can be opened."""
    names = (f"{_PIPE}{rank}.pipe", f"{_PIPE}{rank}.pipe (deleted)")
    return next((path for path, file in open_files(pid) if os.path.basename(file) in names), None)
