"""`ddp-train runs`: what the jobs of a sweep came to."""

from __future__ import annotations

from pathlib import Path

from ddp_train.errors import DONE, ConfigError
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.result import Status
from ddp_train.sweep.folder import Sweep
from ddp_train.sweep.table import show
from ddp_train.system.folder_lock import is_held

USAGE = """ddp-train runs SWEEP

  SWEEP          the folder of a sweep: its table is shown, the best job first
"""


def show_sweep(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train runs SWEEP`: show the table of a sweep. Starts nothing."""
    if len(arguments) != 1:
        raise ConfigError(happened="which sweep?", expected="ddp-train runs SWEEP", fix="give the folder of a sweep")
    sweep = Sweep.load(Path(arguments[0]).absolute())
    for job in sweep.jobs:  # the folders know more than sweep.json, when everything was killed
        if job.status != Status.RUNNING or not is_held(sweep.root):
            sweep.read_result(job, sweep.metric)
    show(sweep)
    return DONE
