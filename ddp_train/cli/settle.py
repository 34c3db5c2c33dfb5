"""`ddp-train settle`: whether a run is done, is started again, or never again by itself."""

from __future__ import annotations

from pathlib import Path

from ddp_train.cli.saved_run import run_of
from ddp_train.errors import DONE, ConfigError, UserError
from ddp_train.launch.engine.engine import Stage, Submission, engine_of
from ddp_train.launch.launcher import Launcher
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Verdict, begin_life, settle

USAGE = """ddp-train settle RUN [--begins] [--job=ID]

  RUN            a run folder: says `done`, `again: why` or `never: why`, for batch scripts and people
  --begins       the run is just about to be started: count it, so that it is not started for ever
  --job=ID       who asks, by the engine's name of it: never for one job while another one has the run

Exit code: 0 done; 75 again; never has the code of its failure (1, 2, 78, 93), or 130 when somebody stopped the run.
"""


def settle_run(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train settle RUN [--begins] [--job=ID]`: print the verdict on a run, and return it as an exit code. Starts nothing."""
    folders = [text for text in arguments if text != "--begins" and not text.startswith("--job=")]
    job = next((text.removeprefix("--job=") for text in arguments if text.startswith("--job=")), "")
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(happened="which run?", expected="ddp-train settle RUN [--begins] [--job=ID]", fix="give a run folder")
    run_folder = RunFolder(run_of(Path(folders[0])))
    if job and (other := _other_job(run_folder, job)):
        print(f"never: job {other} has this run")
        return DONE
    settled = settle(run_folder)
    if "--begins" in arguments and settled.verdict == Verdict.AGAIN:
        begin_life(run_folder)
    print(settled)
    return settled.exit_code


def _other_job(run_folder: RunFolder, job: str) -> str:
    """Return the job that has a run, where it is another one than the one that asks and has not ended; else note the one that asks.

    A command that was killed while it submitted has noted nothing: then two jobs are in the queue when somebody submits the run again.
    """
    noted = Submission.read(run_folder)
    if noted is not None and noted.id == job:
        return ""
    try:
        if noted is not None and engine_of(noted.engine).state(noted.id).stage is not Stage.ENDED:
            return noted.id
    except UserError:  # in a container without SLURM's commands, say; the folder's lock has the last word
        pass
    Submission(engine=Spec.read(run_folder.spec).engine, id=job).write(run_folder)
    return ""
