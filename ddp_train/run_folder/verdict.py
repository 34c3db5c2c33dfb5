"""The verdict on a run, from its folder alone: it is done, is to be started again, or never again by itself.

Batch scripts, people and tests use it alone. An exit code would not do: it is lost with its process, and that of `srun` is the code of
whichever task ended first.
"""

import getpass
import json
import os
import sys
import time
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FAILED, FINAL, INTERRUPTED, NO_PROGRESS, PREEMPTED, TERMINATED, one_line
from ddp_train.run_folder import failure
from ddp_train.run_folder.failure import Failure, FailureKind
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Result, Status
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_json

_SHOWN = 200  # characters of an error
_POLL_S = 0.5
RESULT_VISIBLE_WITHIN_S = 10.0  # until another machine sees result.json on a network file system


class Outcome(StrEnum):
    """What to do with a run that no process works on."""

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
    """Return the verdict on a run: done (0), again (75), or never (the code of its failure; 130 after Ctrl-C)."""
    result = run_folder.read_result()
    if result is not None and result.status == Status.COMPLETED:
        return Verdict(Outcome.DONE, "", DONE)
    resume = run_folder.resume_command()
    if run_folder.cancelled.exists():
        by = ""
        with suppress(OSError, ValueError, KeyError, TypeError):  # a half-written marker counts as well
            marker = json.loads(run_folder.cancelled.read_text())
            by = f" by {marker['by']} at {marker['time']}"
        return Verdict(Outcome.NEVER, f"cancelled{by}; `{resume}` continues it {run_folder.resume_point_text()}", INTERRUPTED)
    error = one_line((result.error if result is not None else None) or "", _SHOWN)
    if result is not None and result.has_no_progress:
        return Verdict(Outcome.NEVER, f"{error}; fix it, then `{resume}`", NO_PROGRESS)
    report = failure.load_report(run_folder.failure)
    if report is not None and report.exit_code in FINAL:
        return Verdict(Outcome.NEVER, f"{report.who}: {report.line(_SHOWN)}; fix it, then `{resume}`", report.exit_code)
    if result is not None and result.status == Status.INTERRUPTED:
        return Verdict(Outcome.NEVER, f"stopped by Ctrl-C; `{resume}` continues it {run_folder.resume_point_text()}", INTERRUPTED)
    if result is not None and result.status == Status.PREEMPTED:
        reason = "stopped in good order"
    elif report is not None:
        reason = f"it failed: {report.who}: {report.line(_SHOWN)}"
    elif result is not None and result.status == Status.FAILED:
        reason = f"it failed: {error or 'unknown reason'}"
    else:
        reason = "the run ended without writing result.json"
    return Verdict(Outcome.AGAIN, f"{reason}; it continues {run_folder.resume_point_text()}", PREEMPTED)


def note_refusal(run_folder: RunFolder, code: int, *, logs: str, is_elastic: bool) -> None:
    """Write a report for a machine that refused and could not write one: it does not see the folder, or has no interpreter.

    If all machines are needed, the others are stopped for it. If not (`is_elastic`), a result or report of theirs counts instead.

    `code` is the highest exit code of the machines: only one of `errors.FINAL` counts. In the `logs` the machine may have given a reason.
    """
    code = ENVIRONMENT_REFUSES if code in (126, 127) else code  # exit codes of a shell that cannot run its command
    report = failure.load_report(run_folder.failure)
    if code not in FINAL or verdict_of(run_folder).outcome != Outcome.AGAIN or (is_elastic and (report or run_folder.read_result())):
        return
    run_folder.archive_failure()
    message = f"a machine refused (exit code {code}); see {logs}"
    report = Failure(kind=FailureKind.REFUSAL, rank=None, pid=None, error="MachineRefused", message=message, exit_code=code)
    report.record(run_folder)


def verdict_after_end(run_folder: RunFolder, *, within_s: float = RESULT_VISIBLE_WITHIN_S) -> tuple[Verdict, int]:
    """Return the verdict on an ended run, whose result.json may be visible here late, and the exit code for a command that follows it."""
    wait_until(
        lambda: verdict_of(run_folder).outcome != Outcome.AGAIN or run_folder.read_result() is not None, within_s=within_s, every_s=_POLL_S
    )
    verdict = verdict_of(run_folder)
    if verdict.outcome != Outcome.AGAIN:
        return verdict, verdict.exit_code
    return verdict, code_of_stop(run_folder) or FAILED


def code_of_stop(run_folder: RunFolder, *, in_sweep: bool = False) -> int | None:
    """Return the exit code of a run that has stopped in good order; None: result.json does not say so.

    TERMINATED: without a checkpoint, of this attempt or an earlier one; but PREEMPTED for a job `in_sweep`, which waits again.
    """
    result = run_folder.read_result()
    if result is None or result.status not in EXIT_CODE_OF_STOP:
        return None
    is_saved = in_sweep or result.step is not None or any(run_folder.saved_steps())
    return EXIT_CODE_OF_STOP[result.status] if is_saved or result.status == Status.INTERRUPTED else TERMINATED


def exit_code_after_agent(run_folder: RunFolder, agent_code: int, *, before: Result | None) -> int:
    """Return the exit code of a command whose agent has ended, and write result.json if no process was left to do so.

    `agent_code` is the exit code of the agent (130 and 143 after a stop signal), `before` the content of result.json when the run began.
    """
    result = run_folder.read_result()
    status = {INTERRUPTED: Status.INTERRUPTED, TERMINATED: Status.PREEMPTED}.get(agent_code, Status.FAILED)
    if agent_code != DONE and result is None:  # no rank and no agent was left to write it
        with suppress(OSError):  # a full disk, say, perhaps the reason itself: the exit code has it as well
            Result(status=status).write(run_folder.result)
    if result is not None and (stopped := code_of_stop(run_folder)) is not None:  # rank 0 has printed it, and how to continue
        return stopped
    if result is not None and result.status == Status.COMPLETED and result != before:  # the signal came after the last step
        return DONE
    if agent_code in (INTERRUPTED, TERMINATED):  # a stop while the ranks were being started, a second one, or a full disk
        how = f"continues {run_folder.resume_point_text()}" if any(run_folder.saved_steps()) else "starts again: nothing is saved"
        print(f"stopped; `{run_folder.resume_command()}` {how}", file=sys.stderr)
    return PREEMPTED if agent_code == TERMINATED and any(run_folder.saved_steps()) else agent_code


def mark_cancelled(run_folder: RunFolder) -> None:
    """Mark that only a person starts the run again. Called before anything is stopped: a scheduler may ask as soon as the run ends.

    An empty marker is enough, and fits on most full disks. Raises OSError: not even that can be written.
    """
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a number without a name, as in a container
        user = getpass.getuser()
    try:
        write_json(run_folder.cancelled, {"by": f"{user} on {os.uname().nodename}", "time": time.strftime("%Y-%m-%d %H:%M:%S")})
    except OSError:
        run_folder.cancelled.parent.mkdir(exist_ok=True)
        run_folder.cancelled.touch()
