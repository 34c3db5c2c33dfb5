"""`ddp-train verdict`: whether a run is done, is started again, or never again by itself."""

from __future__ import annotations

import sys

from ddp_train.cli.saved_run import run_of
from ddp_train.cli.status import folder_of
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FINAL, UserError
from ddp_train.launch.engine.engine import Stage, Submission, engine_of
from ddp_train.launch.launcher import Launcher
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.starts import check_progress, count_start
from ddp_train.run_folder.verdict import Outcome, Verdict, note_refusal, verdict_of

USAGE = """ddp-train verdict RUN [--begins] [--job=ID] [--ended=CODE]

  RUN            a run folder: says `done`, `again: why` or `never: why`, for batch scripts and people
  --begins       the run is just about to be started: count it, so that it is not started for ever
  --job=ID       who asks, by the engine's name of it: never for one job while another one has the run
  --ended=CODE   the machines have ended with this exit code: 2, 78, 93, 126 and 127 of one that left no report mean never

Exit code: 0 done; 75 again; never has the code of its failure (1, 2, 78, 93), or 130 when somebody stopped the run.
"""


def show_verdict(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train verdict RUN [--begins] [--job=ID] [--ended=CODE]`: print the verdict on a run, and return it. Starts nothing."""
    folders = [text for text in arguments if text != "--begins" and not text.startswith(("--job=", "--ended="))]
    job, ended = _given("--job=", arguments), _given("--ended=", arguments) or "0"
    folder = folder_of(folders if ended.isdigit() else [], USAGE)
    run_folder = RunFolder(run_of(folder))
    if job and (other := _other_job(run_folder, job)):
        print(f"never: job {other} has this run")
        return DONE
    if int(ended) != DONE:
        note_refusal(run_folder, int(ended), logs=f"the logs {run_folder.shown()}/logs/slurm-*.out", is_elastic=_is_elastic(run_folder))
    verdict = verdict_of(run_folder)
    is_silent = not run_folder.failure.exists() and run_folder.read_result() is None  # no report could be written: a full disk
    if int(ended) in FINAL and verdict.outcome == Outcome.AGAIN and is_silent:
        verdict = Verdict(Outcome.NEVER, f"its machines ended with {ended}; mend what its log says", int(ended))
    if "--begins" in arguments and verdict.outcome == Outcome.AGAIN:
        try:
            if problem := check_progress(run_folder, by_engine=True):
                print(problem, file=sys.stderr)
                verdict = verdict_of(run_folder)
            else:
                count_start(run_folder, by_engine=True)
        except OSError as error:
            verdict = Verdict(Outcome.NEVER, f"{run_folder.shown()} cannot be written: {error.strerror}", ENVIRONMENT_REFUSES)
    print(verdict)
    return verdict.exit_code


def _given(option: str, arguments: list[str]) -> str:
    return next((text.removeprefix(option) for text in arguments if text.startswith(option)), "")


def _is_elastic(run_folder: RunFolder) -> bool:
    try:
        spec = Spec.read(run_folder.spec)
    except UserError:  # which is why a machine refused
        return False
    return spec.min_nodes < spec.max_nodes


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
