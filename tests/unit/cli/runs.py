"""Run folders as runs leave them, and an engine whose answers are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.folder_lock import holder_of
from tests.conftest import wait_for
from tests.unit.parts import checked

HOLDS = """
import signal, sys, time
from pathlib import Path
from ddp_train.system.folder_lock import lock
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
lock(Path(sys.argv[1]), key="k")
time.sleep(60)
"""


def a_run(root: Path, *overrides: str) -> RunFolder:
    """Make the folder of a run that has begun."""
    run_folder = RunFolder(root)
    run_folder.logs.mkdir(parents=True)
    run_folder.record_config(checked("trainer.max_steps=100", *overrides).yaml())
    return run_folder


def works_in(run_folder: RunFolder) -> subprocess.Popen[bytes]:
    """Start a process that holds a folder until it gets SIGTERM."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run_folder.root)], env=os.environ)
    wait_for(lambda: (holder := holder_of(run_folder.root)) is not None and holder.pid == process.pid)  # a killed run leaves its own
    return process
