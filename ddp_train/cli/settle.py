"""`ddp-train settle`: whether a run is done, is started again, or never again by itself."""

from __future__ import annotations

from pathlib import Path

from ddp_train.cli.saved_run import run_of
from ddp_train.errors import ConfigError
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Verdict, begin_life, settle

USAGE = """ddp-train settle RUN [--begins]

  RUN            a run folder: says `done`, `again: why` or `never: why`, for batch scripts and people
  --begins       the run is just about to be started: count it, so that it is not started for ever

Exit code: 0 done; 75 again; never has the code of its failure (1, 2, 78, 93), or 130 when somebody stopped the run.
"""


def settle_run(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train settle RUN [--begins]`: print the verdict on a run, and return it as an exit code. Starts nothing."""
    folders = [text for text in arguments if text != "--begins"]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(happened="which run?", expected="ddp-train settle RUN [--begins]", fix="give a run folder")
    run_folder = RunFolder(run_of(Path(folders[0])))
    settled = settle(run_folder)
    if "--begins" in arguments and settled.verdict == Verdict.AGAIN:
        begin_life(run_folder)
    print(settled)
    return settled.exit_code
