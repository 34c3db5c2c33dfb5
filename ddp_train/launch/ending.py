"""How a run ends: when it has to stop for its time limit, and with which code its command ends."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from ddp_train.config.schema import ClusterConfig
from ddp_train.config.values import seconds_of
from ddp_train.errors import DONE, INTERRUPTED, PREEMPTED, TERMINATED, UserError
from ddp_train.run_folder import restart_note
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import STOPPED, Result, Status
from ddp_train.system.torchrun_env import is_torchrun_worker


def exit_code(run_folder: RunFolder, code: int, *, before: Result | None) -> int:
    """Return the exit code of a run that has ended, as its folder says it, and leave a result.json where nobody was left to write it.

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


def stops_at(cluster: ClusterConfig, *, asks_slurm: bool = False) -> float | None:
    """Return when to stop, in seconds since the epoch; None: no limit is known.

    A job of `cluster=slurm` has asked SLURM for its walltime: there SLURM's word counts, which may be another by now.

    Args:
        asks_slurm: `scontrol update` may have moved the end since the job began: ask for it. Takes up to the client's time-out.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # seconds since the epoch, in the environment of sbatch and srun
    ends = float(end) if end.isdigit() else None
    if asks_slurm and ends is not None and (job := os.environ.get("SLURM_JOB_ID")):
        from ddp_train.launch.engine import slurm_client  # which a rank needs once, if ever

        with suppress(UserError):  # no client in this container, or a controller that does not answer
            ends = slurm_client.state(job).ends or ends
    limits = [ends] if ends is not None and ends > time.time() else []  # else of another allocation
    if cluster.walltime is not None and not (limits and cluster.launcher == "slurm"):
        limits.append((restart_note.run_started() if is_torchrun_worker() else restart_note.STARTED) + seconds_of(cluster.walltime))
    return min(limits) - cluster.grace_s if limits else None
