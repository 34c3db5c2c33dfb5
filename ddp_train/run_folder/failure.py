"""The report on a failed run: which rank failed first, where, and why; for the screen and failure.json.

It is made of lines of a rank's log that tell how the rank ended (each has its pid, because earlier attempts wrote to the same log), and of
the lines of a traceback that tell a person most.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from ddp_train.errors import FAILED, NO_PROGRESS, UserError, one_line, printable
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.files import create_json, tail
from ddp_train.system.redaction import redact_code

_LINES_SHOWN = 8
_SCREEN_LINES = 15  # without blank ones; frames of the traceback are left out to fit, except the last two
_FIXES = {  # for errors of libraries: a pattern in the text -> the fix
    r"^(CUDA )?OutOfMemoryError|CUDA out of memory": "a smaller loader.micro_batch_size with more trainer.grad_accum_steps, or amp=bf16",
    r"Unable to find address for|no socket interface found": "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME as `ip -br address` shows it",
    r"Duplicate GPU detected": "one GPU for each process: check CUDA_VISIBLE_DEVICES and cluster.processes_per_node",
    r"^(BackendCompilerFailed|InductorError|InvalidCxxCompiler)": "compile=off, or other regions with compile.regions=[CLASS]",
    r"does not have a deterministic implementation": "deterministic=false, or another operation",
}

BEGINS = "begins (pid %d)"  # a rank's first line (`native_error` reads what follows it)
ACTIVITY = "(pid %d) was %s"  # what a rank was doing when it ended (for `last_activities`)
_NATIVE_WORDS = re.compile(r"(?:CUDA error|NCCL error|NCCL WARN|ncclRemoteError|Watchdog caught).*")
_MAX_LINE_CHARACTERS = 300
_TAIL_BYTES = 100_000  # of a rank's log
_FRAMES_KEPT = 8  # the innermost ones of a traceback, in failure.json
_CALL_WRAPPERS = ("torch/nn/modules/module.py", "torch/nn/parallel/distributed.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")


class FailureKind(StrEnum):
    RANK = "rank"
    CONNECTION = "connection"  # of a rank: another one is gone, and has left no report
    HANG = "hang"  # of a rank
    MACHINE = "machine"  # it was lost with all its ranks; `rank` is the first of them
    REFUSAL = "refusal"  # of a machine that could not write its own report


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The content of failure.json: the earliest failure of a run."""

    kind: FailureKind = FailureKind.RANK
    rank: int | None  # None: of a machine that refused
    host: str = field(default_factory=socket.gethostname)
    pid: int | None  # None: of a machine
    step: int | None = None  # steps taken before it; None: not known
    error: str  # the exception's type, or the signal
    message: str
    key: str = ""  # the config key to look at, "" where unknown
    traceback: str = ""  # "": an error that the user can fix by its message, or a process that died
    time: float = field(default_factory=time.time)  # seconds since the epoch
    fix: str = ""  # for an error of a library, if we know one
    others: tuple[str, ...] = ()  # what the other ranks were doing, a line for each different answer
    exit_code: int = FAILED  # the rank's and the run's; one of `errors.FINAL` is not started again
    stacks: str = ""  # below the run folder: the files with the stacks of all threads of all ranks; "": none

    def with_others(self, others: Mapping[int, str]) -> Failure:
        """Return this failure with the other ranks' activities: a line for each different one, with its ranks."""
        ranks_of: dict[str, list[int]] = {}
        for rank, text in sorted(others.items()):
            ranks_of.setdefault(text, []).append(rank)
        lines = [f"{_ranks_text(ranks):<12} {text}" for text, ranks in ranks_of.items()]
        more = sum(len(ranks) for ranks in [*ranks_of.values()][_LINES_SHOWN:])
        return replace(self, others=(*lines[:_LINES_SHOWN], *([f"... and {more} more"] if more else [])))

    def record(self, run_folder: RunFolder, *, seconds: float = 0.0) -> bool:
        """Write failure.json and result.json unless another rank was earlier; tell whether this one was first.

        Never raises: it prints an OSError, such as the full disk that may be the failure itself.
        """
        is_first = not os.path.exists(run_folder.failure)  # unlike Path.exists it never raises
        try:
            is_first = create_json(run_folder.failure, asdict(self))
            if is_first:
                error = f"{self.error}: {self.message}"
                no_progress = self.exit_code == NO_PROGRESS
                result = Result(status=Status.FAILED, step=self.step, seconds=round(seconds, 3), error=error, has_no_progress=no_progress)
                result.write(run_folder.result)
        except OSError as error:
            print(f"{run_folder.as_typed()} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return is_first

    def tell_torchrun(self, file: str, *, is_by_peer: bool) -> None:
        """Write `error.json` in torch's form, which torchrun's page shows and TorchX and operators pass on."""
        second = math.ceil(self.time) if is_by_peer else int(self.time)  # torch takes the earliest second for the cause
        more = {"py_callstack": self.traceback or self.message, "timestamp": str(second)}
        with suppress(OSError):
            create_json(Path(file), {"message": {"message": f"{self.error}: {self.message}", "extraInfo": more}})

    @property
    def who(self) -> str:
        """The rank that failed, or the machine that was lost."""
        if self.kind == FailureKind.REFUSAL:
            return "a machine"
        return f"machine {self.host}" if self.kind == FailureKind.MACHINE else f"rank {self.rank} on {self.host} (pid {self.pid})"

    def line(self, max_characters: int) -> str:
        """Return the error and its message as one line, cut after `max_characters`."""
        return one_line(f"{self.error}: {self.message}", max_characters)

    def screen(self, run_folder: RunFolder) -> str:
        """Return the report for the terminal; the log of the rank has the rest."""
        head = f"The run failed: {self.who}{'' if self.step is None else f', after step {self.step}'}"
        below = [
            *([f"  fix: {self.fix}"] if self.fix else []),
            "",
            *(["Meanwhile", *(f"  {line}" for line in self.others), ""] if self.others else []),
            *([f"  rank's log   {run_folder.as_typed()}/logs/{run_folder.rank_log(self.rank).name}"] if self.rank is not None else []),
            *([f"  all stacks   {run_folder.as_typed()}/{self.stacks}"] if self.stacks else []),
            *([f"  this report  {run_folder.as_typed()}/{run_folder.failure.name}"] if run_folder.failure.exists() else []),
            "",
        ]
        room = _SCREEN_LINES - 1 - sum(map(bool, below))
        return printable("\n".join(["", head, "", *(fit(self.traceback, room) or self.message.splitlines()), *below]))


def from_exception(error: BaseException, *, rank: int, step: int | None) -> Failure:
    is_user_error = isinstance(error, UserError)
    name = type(error).__name__
    frames = shorten(traceback.extract_tb(error.__traceback__))
    return Failure(
        rank=rank,
        pid=os.getpid(),
        step=step,
        error=name,
        message=_text(error),
        key=error.key if isinstance(error, UserError) else "",
        traceback="" if is_user_error else redact_code("".join([frames, *traceback.format_exception_only(error)])),
        exit_code=error.exit_code if isinstance(error, UserError) else FAILED,
        fix="" if is_user_error else next((fix for pattern, fix in _FIXES.items() if re.search(pattern, f"{name}: {_text(error)}")), ""),
    )


def from_exit(
    *, rank: int, pid: int, exit_code: int | None, run_folder: RunFolder | None = None, was_out_of_memory: bool | None = None
) -> Failure:
    """Describe a rank that died without a report: by a signal (negative exit code, as in subprocess) or an exit.

    Args:
        exit_code: None: another rank noticed its end, and no agent of ours knows how it died.
        run_folder: has its log, with the last error of CUDA or NCCL: NCCL's watchdog ends the process whose GPU reports one.
        was_out_of_memory: whether the kernel's out-of-memory killer has ended a process meanwhile; None: not known.
    """
    fix = ""
    if exit_code is None:
        error = "ProcessLost"
        message = "the process ended without a report; torchrun's own page has its signal or exit code"
    elif exit_code < 0:
        error = signal.Signals(-exit_code).name
        message = f"the process was ended by {error}"
        if error == "SIGKILL" and was_out_of_memory is not False:
            cause = ", sent by the kernel's out-of-memory killer: this machine's memory, or the job's share of it, was used up"
            message += cause if was_out_of_memory else " (often the out-of-memory killer: check dmesg)"
            fix = "a smaller loader.micro_batch_size, fewer loader.num_workers, or more memory for the job"
        native_line = native_error(run_folder, rank, pid) if run_folder is not None else ""
        if error == "SIGABRT" and native_line:
            message += f" after this line in its log: {native_line}"
            fix = "+cluster.env.CUDA_LAUNCH_BLOCKING=1 shows its Python line" if native_line.startswith("CUDA error") else ""
    else:
        error = "ProcessExit"
        message = f"the process exited with code {exit_code} without a report"
    return Failure(rank=rank, pid=pid, error=error, message=message, fix=fix)


def from_agent(*, pid: int, signal_name: str) -> Failure:
    """Describe the end of an agent, which has ended its ranks too."""
    message = f"torchrun's agent (pid {pid}) was ended by {signal_name}; its ranks ended with it"
    return Failure(rank=0, pid=pid, error=signal_name, message=message)


def from_machine(*, host: str, ranks: Sequence[int], why: str) -> Failure:
    message = f"{host} {why}; lost with it: {_ranks_text(ranks)}"
    return Failure(kind=FailureKind.MACHINE, rank=ranks[0], host=host, pid=None, error="MachineLost", message=message)


def load_report(path: Path) -> Failure | None:
    """Read failure.json, or that of an earlier attempt; None: it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
        return Failure(**content | {"kind": FailureKind(content["kind"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _text(error: BaseException) -> str:
    try:
        return redact_code(str(error))
    except Exception as problem:  # a user's own exception class
        return f"(its text cannot be read: {type(problem).__name__})"


def _ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order as `rank 3` or `ranks 0-2, 5`."""
    ranges = []
    for _, group in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):  # numbers that follow each other
        together = [rank for _, rank in group]
        ranges.append(f"{together[0]}" if len(together) == 1 else f"{together[0]}-{together[-1]}")
    return f"rank {ranges[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranges)}"


def native_error(run_folder: RunFolder, rank: int, pid: int) -> str:
    """Return the last line that CUDA or NCCL wrote into the log of an ended rank; "": they wrote none."""
    text = tail(run_folder.rank_log(rank), _TAIL_BYTES).rpartition(BEGINS % pid)[2]
    lines = [match[0] for line in text.splitlines() if (match := _NATIVE_WORDS.search(line))]
    return redact_code(lines[-1][:_MAX_LINE_CHARACTERS]) if lines else ""


def last_activities(run_folder: RunFolder, pids: Mapping[int, int]) -> dict[int, str]:
    """Return the activity of each rank at its end, from the logs; `pids` has the pid of each."""
    activities = {}
    for rank, pid in pids.items():
        lines = re.findall(re.escape(ACTIVITY % (pid, "")) + "(.+)", tail(run_folder.rank_log(rank), _TAIL_BYTES))
        activities[rank] = lines[-1] if lines else "logged nothing"
    return activities


def shorten(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format frames without those in which torch only passes a call on. The rank's log has them all."""
    informative = [frame for frame in frames if not frame.filename.endswith(_CALL_WRAPPERS)] or frames
    return "".join(["Traceback (most recent call last, shortened):\n", *traceback.format_list(informative[-_FRAMES_KEPT:])])


def fit(text: str, num_lines: int) -> list[str]:
    """Return the lines of a traceback, its last frames alone where they are more than `num_lines`; at least two frames."""
    lines = [line for line in text.rstrip().splitlines() if line.strip(" ^~")]
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    first_line = next((index for index in frames[:-2] if len(lines) - index + 1 <= num_lines), frames[-2] if len(frames) > 1 else 1)
    return lines[:1] + lines[first_line:] if frames else lines
