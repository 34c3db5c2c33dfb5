"""A run that comes after others (`after=RUN`): it begins when they are done.

SLURM waits by itself (`--dependency`). Everywhere else this process does, and says for what.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_train.config.run_config import RunConfig
from ddp_train.errors import DONE, INTERRUPTED, TERMINATED, EnvironmentRefuses, printable
from ddp_train.job import Job
from ddp_train.launch.agent_process import expect_none
from ddp_train.run_folder import failure
from ddp_train.run_folder.attempts import steps_taken
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status, status_of
from ddp_train.run_folder.verdict import Settled, Verdict, settle
from ddp_train.system.folder_lock import is_held
from ddp_train.system.process import STOP_SIGNALS

WAITS_ITSELF = ("slurm",)
"""Engines that are told what a job comes after."""

_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 60.0
_UNSEEN_FOR_S = 300.0  # a file server that is away for some minutes


def before(job: Job) -> list[Path]:
    """Return the folders of the runs that a job waits for; [] for one that has begun before, or trains nothing."""
    return [] if job.run_folder.environment.exists() or job.examines else job.config.runs_before()


def wait_for_runs(job: Job, *, is_asked: bool = False) -> int:
    """Wait until a job may begin.

    Args:
        is_asked: also for a job of SLURM: it has its machines already.

    Returns:
        0, or the exit code with which it ends instead: 78 when it never may, 130 or 143 after a stop signal. result.json says so then.
    """
    if job.config.cluster.launcher in WAITS_ITSELF and not is_asked:
        return DONE
    try:
        return wait(before(job), who=job.run_folder.shown())
    except EnvironmentRefuses as error:
        failure.from_exception(error, rank=0, step=None).record(job.run_folder)
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        with suppress(OSError):
            Result(status=stop.status).write(job.run_folder.result)
        return stop.exit_code


def wait_before_meeting(config: RunConfig) -> int:
    """Wait on each machine of a run by hand, before they meet: the first one would come hours after the others otherwise.

    Returns:
        0, or the exit code with which the command ends instead.
    """
    try:
        return wait(config.runs_before())
    except EnvironmentRefuses as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        return stop.exit_code


class Stopped(Exception):
    """A stop signal came while a run was waited for."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status: Status = status_of(number)
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED


def wait(folders: Sequence[Path], *, who: str = "") -> int:
    """Wait until all these runs are done, and return 0.

    Args:
        who: what waits, as `ddp-train resume` would be given it; "": it has no folder yet.

    Raises:
        EnvironmentRefuses: one of them never will be.
        Stopped: by a signal.
    """
    waited = [folder for folder in folders if settle(RunFolder(folder)).verdict != Verdict.DONE]
    if not waited:
        return DONE
    expect_none()  # for so long: it has its memory
    try:
        with _stops():
            for folder in waited:
                _wait_for_one(folder, who)
    except Stopped:
        print(f"\nstopped while it waited; {f'`ddp-train resume {who}` waits again' if who else 'nothing was begun'}", file=sys.stderr)
        raise
    return DONE


def require_possible(folder: Path, *, fix: str = "") -> Settled:
    """Return the verdict on a run: it is done, or it will be.

    Raises:
        EnvironmentRefuses: it never will be.
    """
    settled = settle(RunFolder(folder))
    if settled.verdict == Verdict.NEVER:
        raise EnvironmentRefuses(
            key="after",
            happened=f"{RunFolder(folder).shown()} does not get done: {settled.reason}",
            expected="a run that is done, or on its way",
            fix=fix,
        )
    return settled


def state(folder: Path, settled: Settled) -> str:
    """Return what there is to say of a run on which this was the verdict."""
    if settled.verdict == Verdict.DONE:
        return "done"
    run_folder = RunFolder(folder)
    if is_held(folder):
        steps, _ = steps_taken(run_folder)
        return f"running, step {steps}" if steps else "starting, or waiting itself"
    if run_folder.submitted.exists() and run_folder.read_result() is None:
        return "submitted, not running"
    return f"not running: {settled.reason}"


def _wait_for_one(folder: Path, who: str) -> None:
    said, said_at, seen_at = "", 0.0, time.monotonic()
    fix = f"when it is done: ddp-train resume {who}" if who else ""
    while True:
        try:
            settled = require_possible(folder, fix=fix)
            if settled.verdict == Verdict.DONE:
                break
            now, seen_at = state(folder, settled), time.monotonic()
        except OSError as error:  # it was moved or removed, or its file server is away
            now = f"cannot be looked at: {error.strerror}"
            if time.monotonic() > seen_at + _UNSEEN_FOR_S:
                raise EnvironmentRefuses(
                    key="after",
                    happened=f"{RunFolder(folder).shown()} {now}, for {_UNSEEN_FOR_S:.0f} s",
                    expected="the folder of a run that is done, or on its way",
                    fix=fix,
                ) from None
        kind = now.partition(",")[0]
        if kind != said or time.monotonic() - said_at > _SAY_EVERY_S:
            print(printable(f"waiting for {RunFolder(folder).shown()}: {now}"), file=sys.stderr, flush=True)
            said, said_at = kind, time.monotonic()
        time.sleep(_LOOK_EVERY_S)
    print(printable(f"{RunFolder(folder).shown()} is done"), file=sys.stderr, flush=True)


@contextmanager
def _stops() -> Iterator[None]:
    """Raise `Stopped` for any stop signal in the block."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    earlier: dict[int, Any] = {number: signal.signal(number, on_signal) for number in heard}
    mask: set[Any] = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)  # what was held back until somebody listens comes now
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in earlier.items():
            signal.signal(number, handler)
