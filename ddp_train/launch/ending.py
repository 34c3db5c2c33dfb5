"""With which code a command ends: as the run's folder says, and not only as its agent ended."""

from __future__ import annotations

import sys
from contextlib import suppress

from ddp_train.errors import DONE, INTERRUPTED, PREEMPTED, TERMINATED
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import STOPPED, Result, Status


def exit_code(run_folder: RunFolder, code: int, *, before: Result | None) -> int:
    """Return the exit code of a run that has ended, and leave a result.json where nobody was left to write it.

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
        is_saved = result.step is not None or any(run_folder.saved_steps())  # by this attempt, or by one before it
        return STOPPED[result.status] if is_saved or result.status == Status.INTERRUPTED else TERMINATED
    if result is not None and result.status == Status.COMPLETED and result != before:  # the signal came after the last step
        return DONE
    if code in (INTERRUPTED, TERMINATED):  # a stop while the ranks were being started, a second one, or a full disk
        how = f"continues {run_folder.continues()}" if any(run_folder.saved_steps()) else "starts again: nothing is saved"
        print(f"stopped; `ddp-train resume {run_folder.shown()}` {how}", file=sys.stderr)
    return PREEMPTED if code == TERMINATED and any(run_folder.saved_steps()) else code
