"""When a run has to stop for its time limit."""

import os
import time
from contextlib import suppress

from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import UserError
from ddp_train.run_folder import restart_note
from ddp_train.system.torchrun_env import is_torchrun_worker


def stops_at(cluster: ClusterConfig, *, asks_slurm: bool = False) -> float | None:
    """Return when a run has to stop for its time limit, in seconds since the epoch; None: no limit is known.

    A job of `cluster=slurm` has asked SLURM for its walltime: there SLURM's word counts.
    `asks_slurm`: `scontrol update` may have moved the end since the job began: ask for it. Takes up to the client's time-out.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # seconds since the epoch, in the environment of sbatch and srun
    ends = float(end) if end.isdigit() else None
    if asks_slurm and ends is not None and (job := os.environ.get("SLURM_JOB_ID")):
        from ddp_train.launch.engine import slurm_client  # which a rank needs once, if ever

        with suppress(UserError):  # no client in this container, or a controller that does not answer
            ends = slurm_client.state(job).ends or ends
    limits = [ends] if ends is not None and ends > time.time() else []  # else of another allocation
    if cluster.walltime is not None and not (limits and cluster.launcher == "slurm"):
        started = restart_note.run_started() if is_torchrun_worker() else restart_note.STARTED
        limits.append(started + cluster.walltime)
    return min(limits) - cluster.grace_s if limits else None
