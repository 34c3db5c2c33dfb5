"""`ddp-train status`: where a run is, or the runs of a sweep, whoever started them: from the folder, and from the engine that has it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_train.cli.saved_run import run_of
from ddp_train.config.saved import saved_config
from ddp_train.config.values import run_folders
from ddp_train.errors import DONE, ConfigError, UserError, printable
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import evaluation_line, progress
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.sweep.folder import Sweep, is_sweep
from ddp_train.system.folder_lock import holder_of, is_held

USAGE = """ddp-train status RUN

  RUN            a run folder, or the folder of a sweep: is it queued and why, where does it run, how far is it, how did it end
"""


def show_status(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train status RUN-or-SWEEP`: show where it is. Starts nothing."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(happened="no run folder was given", expected="ddp-train status RUN")
    for run_folder, name in runs_of(Path(arguments[0])):
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
