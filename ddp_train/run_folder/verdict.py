"""Whether a run is done, is to be started again, or never again by itself: from its folder alone.

Batch scripts, people and tests ask nothing else. An exit code would not do: it gets lost with the process that had it, and the one of
`srun` is that of whichever task was the first to end.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import sys
import time
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FAILED, FINAL, INTERRUPTED, NO_PROGRESS, PREEMPTED, TERMINATED, one_line
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import STOPPED, Result, Status
from ddp_train.run_folder.starts import NO_PROGRESS_ERROR
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_json

_SHOWN = 200  # characters of an error
_NOT_THERE = (126, 127)  # what a shell ends with that cannot run what it was told to
_POLL_S = 0.5
WORD_WITHIN_S = 10.0  # the last word of a run that has ended, until another machine sees it on a network file system


class Outcome(StrEnum):
    """What is to be done with a run that no process works on."""

    DONE = "done"
    AGAIN = "again"
    NEVER = "never"


class Verdict(NamedTuple):
    """A verdict, the reason for people to read, and the exit code that says the same."""

    outcome: Outcome
    reason: str
    exit_code: int

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome


def verdict_of(run_folder: RunFolder) -> Verdict:
    """Return what is to be done with a run: done (0), again (75), or never (the code of its failure; 130 after Ctrl-C)."""
    result = run_folder.read_result()
    if result is not None and result.status == Status.COMPLETED:
        return Verdict(Outcome.DONE, "", DONE)
    shown = shlex.quote(run_folder.shown())
    if run_folder.cancelled.exists():
        by = ""
        with suppress(OSError, ValueError, KeyError, TypeError):  # half of the marker marks as well
            marker = json.loads(run_folder.cancelled.read_text())
            by = f" by {marker['by']} at {marker['time']}"
        return Verdict(Outcome.NEVER, f"cancelled{by}; `ddp-train resume {shown}` continues it {run_folder.continues()}", INTERRUPTED)
    error = one_line((result.error if result is not None else None) or "", _SHOWN)
    if error.startswith(NO_PROGRESS_ERROR):
        return Verdict(Outcome.NEVER, f"{error}; mend it, then `ddp-train resume {shown}`", NO_PROGRESS)
    report = failure.load(run_folder.failure)
    if report is not None and report.exit_code in FINAL:
        return Verdict(Outcome.NEVER, f"{report.who}: {report.line(_SHOWN)}; mend it, then `ddp-train resume {shown}`", report.exit_code)
    if result is not None and result.status == Status.INTERRUPTED:
        return Verdict(Outcome.NEVER, f"stopped by Ctrl-C; `ddp-train resume {shown}` continues it {run_folder.continues()}", INTERRUPTED)
    if result is not None and result.status == Status.PREEMPTED:
        reason = "stopped in good order"
    elif report is not None:
        reason = f"it failed: {report.who}: {report.line(_SHOWN)}"
    elif result is not None and result.status == Status.FAILED:
        reason = f"it failed: {error or 'no reason is known'}"
    else:
        reason = "the run ended without writing result.json"
    return Verdict(Outcome.AGAIN, f"{reason}; it continues {run_folder.continues()}", PREEMPTED)


def note_refusal(run_folder: RunFolder, code: int, *, logs: str, is_elastic: bool) -> None:
    """Leave a report of a machine that refused and could not do so itself: it does not see the folder, or has no interpreter.

    Where all machines are needed, the others are stopped for it. Where not (`is_elastic`), their word counts, if they have left one.

    Args:
        code: with which the machines ended, the highest one. Only one of `errors.FINAL` counts.
        logs: where the machine may have said why.
    """
    code = ENVIRONMENT_REFUSES if code in _NOT_THERE else code
    report = failure.load(run_folder.failure)
    if code not in FINAL or verdict_of(run_folder).outcome != Outcome.AGAIN or (is_elastic and (report or run_folder.read_result())):
        return
    run_folder.forget_failure()
    message = f"a machine refused (exit code {code}); {logs} say why"
    failure.Failure(rank=0, pid=0, error=failure.MACHINE_REFUSED, message=message, exit_code=code).record(run_folder)


def end_of(run_folder: RunFolder, *, within_s: float = WORD_WITHIN_S) -> tuple[Verdict, int]:
    """Return the verdict on a run that has ended, whose last word may be seen here late, and the code for who has followed it."""
    wait_until(
        lambda: verdict_of(run_folder).outcome != Outcome.AGAIN or run_folder.read_result() is not None, within_s=within_s, every_s=_POLL_S
    )
    verdict, result = verdict_of(run_folder), run_folder.read_result()
    if verdict.outcome != Outcome.AGAIN:
        return verdict, verdict.exit_code
    if result is None or result.status != Status.PREEMPTED:
        return verdict, FAILED
    return verdict, PREEMPTED if _is_saved(run_folder, result) else TERMINATED


def _is_saved(run_folder: RunFolder, result: Result) -> bool:
    """Tell whether a run that was stopped can go on: from this attempt, or from one before it."""
    return result.step is not None or any(run_folder.saved_steps())


def exit_code(run_folder: RunFolder, code: int, *, before: Result | None) -> int:
    """Return the exit code of a run that has ended, and write a result.json where no process was left to do so.

    Args:
        code: how its agent ended; 130 and 143 after a stop signal.
        before: what result.json held when the run began.
    """
    result = run_folder.read_result()
    status = {INTERRUPTED: Status.INTERRUPTED, TERMINATED: Status.PREEMPTED}.get(code, Status.FAILED)
    if code != DONE and result is None:  # no rank and no agent was left to say it
        with suppress(OSError):  # a full disk, say, which may be the very reason: the exit code says it as well
            Result(status=status).write(run_folder.result)
    if result is not None and result.status in STOPPED:  # rank 0 has said so, and how to continue
        return STOPPED[result.status] if result.status == Status.INTERRUPTED or _is_saved(run_folder, result) else TERMINATED
    if result is not None and result.status == Status.COMPLETED and result != before:  # the signal came after the last step
        return DONE
    if code in (INTERRUPTED, TERMINATED):  # a stop while the ranks were being started, a second one, or a full disk
        how = f"continues {run_folder.continues()}" if any(run_folder.saved_steps()) else "starts again: nothing is saved"
        print(f"stopped; `ddp-train resume {run_folder.shown()}` {how}", file=sys.stderr)
    return PREEMPTED if code == TERMINATED and any(run_folder.saved_steps()) else code


def mark_cancelled(run_folder: RunFolder) -> None:
    """Say that nothing but a person starts the run again. Done before anything is stopped: a scheduler may ask as soon as it ends.

    An empty marker is enough, and fits on most disks that are full. OSError where not even that can be made.
    """
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a number without a name, as in a container
        user = getpass.getuser()
    try:
        write_json(run_folder.cancelled, {"by": f"{user} on {os.uname().nodename}", "time": time.strftime("%Y-%m-%d %H:%M:%S")})
    except OSError:
        run_folder.cancelled.parent.mkdir(exist_ok=True)
        run_folder.cancelled.touch()
