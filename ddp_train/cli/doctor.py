"""`ddp-train doctor`: examine the machines on which a run would be, instead of running it."""

from __future__ import annotations

import sys

from ddp_train.cli.compose import EXAMINES, compose
from ddp_train.config.typed_options import options_first
from ddp_train.errors import ConfigError
from ddp_train.job import FULL, QUICK
from ddp_train.launch.launcher import Launcher

USAGE = """ddp-train doctor [--full] [key=value group=option ...]

  key=value      as for the run that is to come: the machines that it would use are examined, with its data and its folder.
                 By hand the same command on each machine, as for the run itself; with cluster=slurm a short job examines them
  --full         also how fast each rank reckons, and how fast the machines send to each other; takes up to a minute

Nothing is trained and nothing is left. The exit code is 0 when the machines are fit, 78 when something is wrong with one of them.
"""

_FULL = "--full"


def examine(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train doctor [--full] [key=value ...]`: examine the machines of a run."""
    words = [word for word in arguments if word != _FULL]
    refused = next((word for word in words if word in ("-m", "--multirun") or word.startswith("resume=")), None)
    if refused is not None:
        raise ConfigError(
            happened=f"doctor examines the machines of one run that is to come, not {refused}", expected=USAGE.partition("\n")[0]
        )
    # A folder that was typed and holds a run is refused, not continued.
    sys.argv[1:] = options_first([*words, "resume=never", f"++{EXAMINES}={FULL if _FULL in arguments else QUICK}"])
    return compose(launcher)
