"""`ddp-train logs`: what a run has said, and says."""

from __future__ import annotations

import time
from pathlib import Path

from ddp_train.cli.status import is_at_work, runs_of, submitted_state
from ddp_train.errors import DONE, ConfigError
from ddp_train.launch.engine.engine import Stage, State
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.log_tail import LogTail
from ddp_train.run_folder.paths import RunFolder

USAGE = """ddp-train logs RUN [-f]

  RUN            a run folder, or the folder of a sweep: the end of what it has said; RUN/logs has all of it, and a log of each rank
  -f             go on with what it says, until it ends
"""

_LAST_BYTES = 8_000
_POLL_S = 0.5
_LOOK_EVERY = 10  # polls: whether it has ended is asked of the engine


def show_logs(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train logs RUN-or-SWEEP [-f]`: show what it says. Starts nothing."""
    follows, folders = "-f" in arguments, [text for text in arguments if text != "-f"]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(happened="no run folder was given", expected="ddp-train logs RUN [-f]")
    runs = [run_folder for run_folder, _ in runs_of(Path(folders[0]))]
    tails = {f"{run_folder.root.name}: " if len(runs) > 1 else "": LogTail(run_folder, last=_LAST_BYTES) for run_folder in runs}
    polls = 0
    while True:
        is_last = not follows or (polls % _LOOK_EVERY == 0 and not any(map(_may_go_on, runs)))
        for name, tail in tails.items():
            for line in tail.lines():
                print(f"{name}{line}", flush=True)
        if is_last:
            return DONE
        polls += 1
        time.sleep(_POLL_S)


def _may_go_on(run_folder: RunFolder) -> bool:
    state = submitted_state(run_folder)
    return isinstance(state, str) or (isinstance(state, State) and state.stage is not Stage.ENDED) or is_at_work(run_folder)
