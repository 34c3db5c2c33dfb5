"""One screen for a failed run: who failed first, where, and why; also kept as failure.json."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass

from ddp_train.errors import UserError
from ddp_train.run_dir import RunDir, create_json, write_json

_FRAMES_SHOWN = 8
_PASSING_ON = ("torch/nn/modules/module.py", "torch/nn/parallel/distributed.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What failure.json holds: the earliest failure of a run."""

    rank: int
    host: str
    pid: int
    step: int | None  # steps taken before it; None: not known
    error: str  # the exception's type, or the signal
    message: str
    key: str  # the config key to look at, "" where unknown
    traceback: str  # "" for an error that the user can mend from its message
    time: float  # seconds since the epoch

    def record(self, run_dir: RunDir, *, seconds: float = 0.0) -> bool:
        """Write failure.json and result.json unless another rank was earlier; tell whether this one was first."""
        if not create_json(run_dir.failure, asdict(self)):
            return False
        write_json(
            run_dir.result,
            {
                "status": "failed",
                "step": self.step,
                "epoch": None,
                "samples": None,
                "metrics": {},
                "seconds": round(seconds, 3),
                "error": f"{self.error}: {self.message}",
            },
        )
        return True

    def screen(self, run_dir: RunDir) -> str:
        """Return what the user reads; the log of the rank has the rest."""
        where = "" if self.step is None else f", after step {self.step}"
        lines = [
            "",
            f"The run failed: rank {self.rank} on {self.host} (pid {self.pid}){where}",
            "",
            *(self.traceback.rstrip().splitlines() or self.message.splitlines()),
            "",
            f"  rank's log   {run_dir.shown()}/logs/{run_dir.rank_log(self.rank).name}",
            f"  this report  {run_dir.shown()}/{run_dir.failure.name}",
            "",
        ]
        return "\n".join(lines)


def from_exception(error: BaseException, *, rank: int, step: int | None) -> Failure:
    """Describe an exception that ended this rank."""
    is_user_error = isinstance(error, UserError)
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        step=step,
        error=type(error).__name__,
        message=str(error),
        key=error.key if isinstance(error, UserError) else "",
        traceback="" if is_user_error else _format(error),
        time=time.time(),
    )


def from_exit(*, rank: int, pid: int, exit_code: int) -> Failure:
    """Describe a rank that died without a word: a signal (negative exit code, as subprocess gives it) or an exit of its own."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (often the out-of-memory killer: look at dmesg, or take a smaller data.micro_batch_size)" if name == "SIGKILL" else ""
        error, message = name, f"the process was ended by {name}{hint}"
    else:
        error, message = "ProcessExit", f"the process exited with code {exit_code} without a report"
    return Failure(
        rank=rank, host=socket.gethostname(), pid=pid, step=None, error=error, message=message, key="", traceback="", time=time.time()
    )


def from_agent(*, pid: int, signal_name: str) -> Failure:
    """Describe the end of an agent, which took its ranks along."""
    return Failure(
        rank=0,
        host=socket.gethostname(),
        pid=pid,
        step=None,
        error=signal_name,
        message=f"torchrun's agent (pid {pid}) was ended by {signal_name}; its ranks ended with it",
        key="",
        traceback="",
        time=time.time(),
    )


def load(run_dir: RunDir) -> Failure | None:
    """Read failure.json back; None when there is none."""
    try:
        return Failure(**json.loads(run_dir.failure.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _format(error: BaseException) -> str:
    """Format the frames that say something, not those in which torch passes a call on. The rank's log has them all."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith(_PASSING_ON)]
    lines = traceback.format_list(frames[-_FRAMES_SHOWN:]) + traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last, shortened):\n", *lines])
