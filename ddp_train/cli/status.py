"""`ddp-train status`, `logs` and `runs`: the state of a run or a sweep, from its folder and from its engine."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_train.cli.saved_run import run_of
from ddp_train.config.saved import saved_config
from ddp_train.config.values import run_folders
from ddp_train.errors import DONE, FAILED, ConfigError, UserError, printable
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.log_tail import LogTail
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import evaluation_line, progress
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import Sweep, is_sweep
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.sweep.gather import gather
from ddp_train.sweep.table import show
from ddp_train.system.folder_lock import hold, holder_of, is_held

USAGE = """ddp-train status RUN

  RUN            a run folder, or the folder of a sweep: is it queued and why, where does it run, how far is it, how did it end
"""

LOGS_USAGE = """ddp-train logs RUN [-f]

  RUN            a run folder, or the folder of a sweep: the end of what it has said; RUN/logs has all of it, and a log of each rank
  -f             go on with what it says, until it ends
"""
RUNS_USAGE = """ddp-train runs SWEEP

  SWEEP          the folder of a sweep: its table is shown, the best job first; exit code 1 when a job has failed, else 0
"""
_LAST_BYTES = 8_000  # of what a run has said
_POLL_S = 0.5
_LOOK_EVERY = 10  # polls: whether it has ended is asked of the engine


def folder_of(words: Sequence[str], usage: str) -> Path:
    """Return the one folder that a command was given; options were taken out before."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(happened="no run folder was given", expected=usage.partition("\n")[0])
    return Path(words[0])


def show_status(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train status RUN-or-SWEEP`: show where it is. Starts nothing."""
    for run_folder, name in runs_of(folder_of(arguments, USAGE)):
        print(f"{name}: {state_of(run_folder)}")
        for line in _details(run_folder):
            print(f"  {line}")
    return DONE


def runs_of(path: Path) -> Iterator[tuple[RunFolder, str]]:
    """Yield the run of a folder, or those of a sweep, with what to call them."""
    if not is_sweep(path):
        run_folder = RunFolder(run_of(path))
        yield run_folder, run_folder.shown()
        return
    sweep = Sweep.load(path.absolute())
    for job in sweep.jobs:
        run_folder = sweep.run_folder(job)
        yield run_folder, f"{job.number}  {sweep.name(run_folder.root)}"


def state_of(run_folder: RunFolder) -> str:
    """Say in one line where a run is."""
    verdict = verdict_of(run_folder)
    if verdict.outcome is Outcome.DONE:
        return "done"
    found = submitted_state(run_folder)
    if isinstance(found, State) and found.stage is not Stage.ENDED:
        return f"{found}, job {_id(run_folder)}"
    if is_at_work(run_folder):
        return f"running ({holder_of(run_folder.root) or 'nobody says who'})"
    if found is None and not run_folder.logs.exists() and run_folder.read_result() is None:
        return "not started"
    how = found if isinstance(found, str) else f"job {_id(run_folder)} {found}" if found is not None else ""
    where = "not known whether it runs" if isinstance(found, str) else "not running"
    return f"{where}; {verdict}" + (f"\n  {how}" if how else "")


def submitted_state(run_folder: RunFolder) -> State | str | None:
    """Return where the engine that has a run says it is; why it cannot be asked; None where none has it."""
    submission = Submission.read(run_folder)
    if submission is None:
        return None
    try:
        return submission.state(run_folder)
    except UserError as error:
        return f"{submission.engine}, job {submission.id}: {error.happened}"


def is_at_work(run_folder: RunFolder) -> bool:
    """Tell whether somebody holds the run folder."""
    return run_folder.root.is_dir() and is_held(run_folder.root)


def _details(run_folder: RunFolder) -> Iterator[str]:
    config: dict[str, Any] = saved_config(run_folder.root) if run_folder.config.exists() else {}
    trainer: dict[str, Any] = config.get("trainer", {})
    has_begun = run_folder.environment.exists() or run_folder.is_completed()
    for folder in run_folders(config["after"]) if config.get("after") and not has_begun else ():
        before = RunFolder(Path(folder))
        if (verdict := verdict_of(before)).outcome is Outcome.NEVER:
            again = shlex.quote(run_folder.shown())
            yield printable(f"it comes after {before.shown()}, which does not get done: {verdict.reason}; then `ddp-train resume {again}`")
    if run_folder.task.exists():  # an evaluation takes no steps
        if not run_folder.is_completed() and (line := evaluation_line(run_folder)):
            yield line
    elif (far := progress(run_folder)) is not None:
        yield far.line(max_steps=trainer.get("max_steps"), max_epochs=trainer.get("max_epochs"))
    result = run_folder.read_result()
    if result is None and run_folder.result.exists():
        yield f"{run_folder.result} is damaged, and passed over"
    if result is not None and result.status == Status.COMPLETED and result.last:
        yield printable(
            ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in result.last.items())
        )


def _id(run_folder: RunFolder) -> str:
    submission = Submission.read(run_folder)
    return submission.id if submission is not None else ""


def show_logs(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train logs RUN-or-SWEEP [-f]`: show what it says. Starts nothing."""
    follows = "-f" in arguments
    runs = [run_folder for run_folder, _ in runs_of(folder_of([text for text in arguments if text != "-f"], LOGS_USAGE))]
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


def show_sweep(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train runs SWEEP`: show the table of a sweep. Starts nothing."""
    sweep = Sweep.load(folder_of(arguments, RUNS_USAGE).absolute())
    runs_here = {job.number for job in sweep.jobs if job.status == Status.RUNNING} if is_held(sweep.root) else set()
    found = gather(sweep, sweep.metric)  # the folders know more than sweep.json, when everything was killed or no command waits
    for job in sweep.jobs:
        if job.number in runs_here and job.status == Status.INTERRUPTED:
            job.status = Status.RUNNING
    with suppress(ConfigError, OSError):  # the process that holds the folder keeps its table
        hold(sweep.root, key="SWEEP")
        sweep.save()
    show(sweep, found.alive)
    for problem in found.problems:
        print(problem, file=sys.stderr)
    return FAILED if any(job.status == Status.FAILED for job in sweep.jobs) else DONE
