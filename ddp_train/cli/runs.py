"""`ddp-train runs`: what the jobs of a sweep came to, by now."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from ddp_train.errors import DONE, FAILED, ConfigError
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.result import Status
from ddp_train.sweep.folder import Sweep
from ddp_train.sweep.gather import gather
from ddp_train.sweep.table import show
from ddp_train.system.folder_lock import hold, is_held

USAGE = """ddp-train runs SWEEP

  SWEEP          the folder of a sweep: its table is shown, the best job first; exit code 1 when a job has failed, else 0
"""


def show_sweep(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train runs SWEEP`: show the table of a sweep. Starts nothing."""
    if len(arguments) != 1:
        raise ConfigError(happened="no folder of a sweep was given", expected="ddp-train runs SWEEP")
    sweep = Sweep.load(Path(arguments[0]).absolute())
    runs_here = {job.number for job in sweep.jobs if job.status == Status.RUNNING} if is_held(sweep.root) else set()
    found = gather(sweep, sweep.metric)  # the folders know more than sweep.json, when everything was killed or nobody waits
    for job in sweep.jobs:
        if job.number in runs_here and job.status == Status.INTERRUPTED:
            job.status = Status.RUNNING
    with suppress(ConfigError, OSError):  # whoever works in it keeps its table
        hold(sweep.root, key="SWEEP")
        sweep.save()
    show(sweep, found.alive)
    for problem in found.problems:
        print(problem, file=sys.stderr)
    return FAILED if any(job.status == Status.FAILED for job in sweep.jobs) else DONE
