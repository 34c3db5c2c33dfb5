"""One screen for a failed run: who failed first, where, and why; also kept as failure.json."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path

from ddp_train import FOLDER
from ddp_train.errors import FAILED, UserError, one_line, printable
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import STOPPED, Result, Status
from ddp_train.system.files import create_json, tail
from ddp_train.system.redaction import redact_code

_FRAMES_KEPT = 8  # of a traceback, in failure.json
_LINES_SHOWN = 8
_SCREEN_LINES = 15  # without blank ones; frames of the traceback are left out for it, all but the last two
_PASSING_ON = ("torch/nn/modules/module.py", "torch/nn/parallel/distributed.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")
_WAITING = (
    "ddp_train/distributed/world.py",
    "ddp_train/distributed/store.py",
    "ddp_train/rank/stop.py",
    "ddp_train/rank/peers.py",
    "ddp_train/system/deadline.py",
)
_NATIVE_WORDS = re.compile(r"(?:CUDA error|NCCL error|NCCL WARN|ncclRemoteError|Watchdog caught).*")
_SAID_CHARACTERS = 300
_TAIL_BYTES = 100_000  # of a rank's log
_ACTIVITIES = {  # a part of the innermost file's path that is not ours -> what is going on
    "torch/autograd/": "in backward",
    "multiprocessing/connection.py": "waiting for data",
    "torch/distributed/": "in a collective",
    "torch/nn/modules/": "in forward",
    "torch/optim/": "in the optimizer's step",
}
_FIXES = {  # of errors that are not ours: what their text looks like -> what helps
    r"^(CUDA )?OutOfMemoryError|CUDA out of memory": "a smaller loader.micro_batch_size with more trainer.grad_accum_steps, or amp=bf16",
    r"Unable to find address for|no socket interface found": "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME as `ip -br address` has it",
    r"Duplicate GPU detected": "a GPU for every process: look at CUDA_VISIBLE_DEVICES and cluster.processes_per_node",
    r"^(BackendCompilerFailed|InductorError|InvalidCxxCompiler)": "compile=off, or compile.regions=[CLASS] with other parts of the model",
    r"does not have a deterministic implementation": "deterministic=false, or another operation in its place",
}

BEGINS, WAS = "begins (pid %d)", "(pid %d) was "
"""What a rank's log has of a process: where its part begins (for `native_words`), and what it was doing (for `last_words`)."""

MACHINE_LOST = "MachineLost"  # the error of a machine that went away with all its ranks
MACHINE_REFUSED = "MachineRefused"  # and of one that could leave nothing in the run's folder itself


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What failure.json holds: the earliest failure of a run."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int
    step: int | None = None  # steps taken before it; None: not known
    error: str  # the exception's type, or the signal
    message: str
    key: str = ""  # the config key to look at, "" where unknown
    traceback: str = ""  # "" for an error that the user can mend from its message, and for a process that died
    time: float = field(default_factory=time.time)  # seconds since the epoch
    fix: str = ""  # for an error that is not ours, where we know one
    others: tuple[str, ...] = ()  # what the other ranks were doing, a line for each different answer
    exit_code: int = FAILED  # of the rank, and of the run; one of `errors.FINAL` is not started again
    stacks: str = ""  # below the run folder: the files with the stacks of all threads of all ranks, where there are some

    def with_others(self, others: Mapping[int, str]) -> Failure:
        """Return this failure with what the other ranks were doing: a line for each different answer, with the ranks that gave it."""
        ranks_of: dict[str, list[int]] = {}
        for rank, text in sorted(others.items()):
            ranks_of.setdefault(text, []).append(rank)
        lines = [f"{_name(ranks):<12} {text}" for text, ranks in ranks_of.items()]
        more = sum(len(ranks) for ranks in [*ranks_of.values()][_LINES_SHOWN:])
        return replace(self, others=(*lines[:_LINES_SHOWN], *([f"... and {more} more"] if more else [])))

    def record(self, run_folder: RunFolder, *, seconds: float = 0.0) -> bool:
        """Write failure.json and result.json unless another rank was earlier; tell whether this one was first.

        Never raises: a full disk, which may be the very failure, is said.
        """
        is_first = not os.path.exists(run_folder.failure)  # unlike Path.exists it never raises
        try:
            is_first = create_json(run_folder.failure, asdict(self))
            if is_first:
                result = Result(status=Status.FAILED, step=self.step, seconds=round(seconds, 3), error=f"{self.error}: {self.message}")
                result.write(run_folder.result)
        except OSError as error:
            print(f"{run_folder.shown()} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return is_first

    def tell_torchrun(self, file: str, *, is_a_peers: bool) -> None:
        """Write what torchrun's own page shows, and TorchX and operators pass on: the file `error.json` in torch's own form."""
        second = math.ceil(self.time) if is_a_peers else int(self.time)  # torch takes the earliest second for the cause
        more = {"py_callstack": self.traceback or self.message, "timestamp": str(second)}
        with suppress(OSError):
            create_json(Path(file), {"message": {"message": f"{self.error}: {self.message}", "extraInfo": more}})

    @property
    def who(self) -> str:
        """The rank that failed, or the machine that was lost."""
        if self.error == MACHINE_REFUSED:
            return "a machine"
        return f"machine {self.host}" if self.error == MACHINE_LOST else f"rank {self.rank} on {self.host} (pid {self.pid})"

    def line(self, most: int) -> str:
        """Return the error and its message as one line, cut after so many characters."""
        return one_line(f"{self.error}: {self.message}", most)

    def screen(self, run_folder: RunFolder) -> str:
        """Return what the user reads; the log of the rank has the rest."""
        where = "" if self.step is None else f", after step {self.step}"
        head = f"The run failed: {self.who}{where}"
        rest = [
            *([f"  fix: {self.fix}"] if self.fix else []),
            "",
            *(["Meanwhile", *(f"  {line}" for line in self.others), ""] if self.others else []),
            f"  rank's log   {run_folder.shown()}/logs/{run_folder.rank_log(self.rank).name}",
            *([f"  all stacks   {run_folder.shown()}/{self.stacks}"] if self.stacks else []),
            *([f"  this report  {run_folder.shown()}/{run_folder.failure.name}"] if run_folder.failure.exists() else []),
            "",
        ]
        room = _SCREEN_LINES - 1 - sum(map(bool, rest))
        return printable("\n".join(["", head, "", *(_fit(self.traceback, room) or self.message.splitlines()), *rest]))


def from_exception(error: BaseException, *, rank: int, step: int | None) -> Failure:
    """Describe an exception that ended this rank."""
    is_user_error, name = isinstance(error, UserError), type(error).__name__
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
    """Describe a rank that died without a word: a signal (negative exit code, as subprocess gives it) or an exit of its own.

    Args:
        exit_code: None: another rank found it gone, and no agent of ours can tell of what it died.
        run_folder: where its log is, with what CUDA or NCCL said last: NCCL's watchdog ends the process of whose GPU it hears an error.
        was_out_of_memory: whether the kernel's out-of-memory killer was at work meanwhile; None: not known.
    """
    fix = ""
    if exit_code is None:
        error, message = "ProcessLost", "the process ended without a report; torchrun's own page has its signal or exit code"
    elif exit_code < 0:
        error = signal.Signals(-exit_code).name
        message = f"the process was ended by {error}"
        if error == "SIGKILL" and was_out_of_memory is not False:
            told = ", sent by the kernel's out-of-memory killer: this machine's memory, or the job's share of it, was used up"
            message += told if was_out_of_memory else " (often the out-of-memory killer: look at dmesg)"
            fix = "a smaller loader.micro_batch_size, fewer loader.num_workers, or more memory for the job"
        said = native_words(run_folder, rank, pid) if run_folder is not None else ""
        if error == "SIGABRT" and said:
            message += f" after this line in its log: {said}"
            fix = "+cluster.env.CUDA_LAUNCH_BLOCKING=1 shows the Python line of it" if said.startswith("CUDA error") else ""
    else:
        error, message = "ProcessExit", f"the process exited with code {exit_code} without a report"
    return Failure(rank=rank, pid=pid, error=error, message=message, fix=fix)


def describe(frames: Sequence[traceback.FrameSummary]) -> str:
    """Say in one line where a stack is: what is going on, and the innermost line that is not a library's."""
    activity = next((what for frame in reversed(frames) for part, what in _ACTIVITIES.items() if part in frame.filename), "")
    own = [frame for frame in frames if _is_own(frame.filename)]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return ", ".join(part for part in (activity, where) if part)


def own_line(error: BaseException) -> str:
    """Return the innermost line of an error's stack that is the user's, else of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    users = [frame for frame in frames if not frame.filename.startswith(str(FOLDER))]
    frame = (users or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"


def describe_error(error: BaseException, *, is_a_peers: bool) -> str:
    """Say in one line what a rank was doing when it failed, by itself or because another one was gone."""
    where = describe(traceback.extract_tb(error.__traceback__))
    return where if is_a_peers else f"failed with {type(error).__name__}, {where}"


def native_words(run_folder: RunFolder, rank: int, pid: int) -> str:
    """Return the last that CUDA or NCCL wrote into the log of a rank that has ended; "" where they wrote nothing."""
    text = tail(run_folder.rank_log(rank), _TAIL_BYTES).rpartition(BEGINS % pid)[2]  # earlier attempts wrote to the same log
    lines = [found[0] for line in text.splitlines() if (found := _NATIVE_WORDS.search(line))]
    return redact_code(lines[-1][:_SAID_CHARACTERS]) if lines else ""


def last_words(run_folder: RunFolder, pids: Mapping[int, int]) -> dict[int, str]:
    """Return what ranks (-> pid: earlier attempts wrote to the same logs) were doing before they ended, as they logged it."""
    found = {}
    for rank, pid in pids.items():
        lines = re.findall(f"{re.escape(WAS % pid)}(.+)", tail(run_folder.rank_log(rank), _TAIL_BYTES))
        found[rank] = lines[-1] if lines else "left no word"
    return found


def from_agent(*, pid: int, signal_name: str) -> Failure:
    """Describe the end of an agent, which took its ranks along."""
    message = f"torchrun's agent (pid {pid}) was ended by {signal_name}; its ranks ended with it"
    return Failure(rank=0, pid=pid, error=signal_name, message=message)


def from_machine(*, host: str, ranks: Sequence[int], why: str) -> Failure:
    """Describe a machine that the others have lost, and with it some ranks."""
    return Failure(rank=ranks[0], host=host, pid=0, error=MACHINE_LOST, message=f"{host} {why}; lost with it: {_name(ranks)}")


def ended_since(run_folder: RunFolder, before: Result | None) -> Result | None:
    """Return the result of a run that was completed, or stopped in good order, since result.json held `before`; None: it was not.

    What is lost after that is no failure. But a completed run may be continued, and fail then.
    """
    result = run_folder.read_result()
    is_ended = result is not None and result != before and (result.status == Status.COMPLETED or result.status in STOPPED)
    return result if is_ended else None


def load(path: Path) -> Failure | None:
    """Read failure.json, or one of an earlier attempt, back; None when there is none."""
    try:
        return Failure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _text(error: BaseException) -> str:
    try:
        return redact_code(str(error))
    except Exception as problem:  # a user's own exception class
        return f"(its text cannot be had: {type(problem).__name__})"


def _name(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order as `rank 3` or `ranks 0-2, 5`."""
    parts = []
    for _, group in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):  # numbers that follow each other
        run = [rank for _, rank in group]
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank {parts[0]}" if len(ranks) == 1 else f"ranks {', '.join(parts)}"


def _is_own(filename: str) -> bool:
    """Tell whether a source file is the user's or ours, and not a library's; some of ours only pass a wait on."""
    if filename.endswith(_WAITING):
        return False
    if filename.startswith(str(FOLDER)):
        return True
    is_library = filename.startswith((sysconfig.get_path("stdlib"), "<")) or "/site-packages/" in filename or "/dist-packages/" in filename
    return not is_library


def shorten(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format the frames that say something, not those in which torch passes a call on. The rank's log has them all."""
    said = [frame for frame in frames if not frame.filename.endswith(_PASSING_ON)] or frames
    return "".join(["Traceback (most recent call last, shortened):\n", *traceback.format_list(said[-_FRAMES_KEPT:])])


def _fit(text: str, room: int) -> list[str]:
    """Return the lines of a traceback without its first frames, so that as many are left as there is room for; at least two frames."""
    lines = [line for line in text.rstrip().splitlines() if line.strip(" ^~")]
    frames = [place for place, line in enumerate(lines) if line.startswith('  File "')]
    kept = next((place for place in frames[:-2] if len(lines) - place + 1 <= room), frames[-2] if len(frames) > 1 else 1)
    return lines[:1] + lines[kept:] if frames else lines
