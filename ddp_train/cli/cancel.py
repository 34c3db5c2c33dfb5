"""`ddp-train cancel`: let a run, or the runs of a sweep, save and end; nobody but a person starts them again."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ddp_train.cli.saved_run import words_of
from ddp_train.cli.status import runs_of, submitted_state
from ddp_train.config.saved import saved_config
from ddp_train.errors import DONE, FAILED, ConfigError, EnvironmentRefuses
from ddp_train.launch.engine.engine import Stage, State, Submission, engine_of
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import is_sweep, sweep_of
from ddp_train.run_folder.verdict import mark_cancelled
from ddp_train.system.folder_lock import holder_of, is_held, is_here

USAGE = """ddp-train cancel RUN [--at-once]

  RUN            a run folder, or the folder of a sweep: what is queued is taken out, what runs saves and ends
  --at-once      do not wait for it to save
"""

_POLL_S = 1.0
_SIGNAL_EVERY_S = 5.0  # one that comes while a job is between two of its steps reaches nobody
_PATIENCE_S = 60.0  # beyond cluster.grace_s


def cancel(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train cancel RUN-or-SWEEP [--at-once]`: end it, and wait until it has ended."""
    given, (typed,) = words_of(arguments, USAGE)
    path, at_once, shown = Path(typed).absolute(), "--at-once" in given, shlex.quote(typed)
    runs = [run_folder for run_folder, _ in runs_of(path) if not run_folder.is_completed()]
    if not runs:
        print(f"{shown} is done: there is nothing to cancel")
        return DONE
    _refuse_job_of_a_sweep(path)
    found = {run_folder.root: _ending(run_folder) for run_folder in runs}  # before anything is marked: it may not be ours to end
    found |= {path: _ending_here(path)} if is_sweep(path) else {}
    endings = {folder: ending for folder, ending in found.items() if ending is not None}
    grace_s = max((saved_config(each.root)["cluster"]["grace_s"] for each in runs if each.config.exists()), default=0)
    _mark_and_ask(runs, endings, at_once=at_once)
    if not _end(list(endings.values()), at_once=at_once, within_s=grace_s + _PATIENCE_S):
        print(f"{shown} has not ended yet; `ddp-train cancel {shown} --at-once` does not wait for it to save", file=sys.stderr)
        return FAILED
    saved = f"; `ddp-train resume {shown}` continues it" + (f" {runs[0].continues()}" if len(runs) == 1 else "")
    print(f"cancelled{saved}")
    return DONE


class _Ending(NamedTuple):
    """Something that is to end."""

    ask: Callable[[bool], None]  # True: at once
    has_ended: Callable[[], bool]


def _ending(run_folder: RunFolder) -> _Ending | None:
    """Return what is queued or runs of a run; None when nothing is or does."""
    submission = Submission.read(run_folder)
    if submission is not None and not _has_ended(run_folder):
        engine, id = engine_of(submission.engine), submission.id
        return _Ending(lambda at_once: engine.stop(id, at_once=at_once), lambda: _has_ended(run_folder))
    return _ending_here(run_folder.root)


def _ending_here(folder: Path) -> _Ending | None:
    """Return the process that holds a folder; None when it is not held. EnvironmentRefuses: it runs on another machine."""
    holder = holder_of(folder)
    if not folder.is_dir() or not is_held(folder) or holder is None:
        return None
    if not is_here(holder):
        happened = f"the process that has {folder} runs on {holder.host} (pid {holder.pid})"
        raise EnvironmentRefuses(happened=happened, expected="the same command there", fix=f"ssh {holder.host} kill {holder.pid}")
    once = [signal.SIGTERM]

    def ask(at_once: bool) -> None:
        if once or at_once:
            with suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGQUIT if at_once else once.pop())

    return _Ending(ask, lambda: not is_held(folder))


def _mark_and_ask(runs: Sequence[RunFolder], endings: Mapping[Path, _Ending], *, at_once: bool) -> None:
    """Mark runs as cancelled, and ask what works on them to end. Marked first: a scheduler may ask for the verdict as soon as it ends.

    One that cannot be marked, on a full disk, would be started again after a save: it is ended at once. Where one cannot be asked, it and
    those after it are not marked: they go on.
    """
    new = {run_folder.root: run_folder for run_folder in runs if not run_folder.cancelled.exists()}
    unmarked = {}
    for run_folder in runs:
        try:
            mark_cancelled(run_folder)
        except OSError as error:
            unmarked[run_folder.root] = error.strerror
    try:
        for folder, ending in endings.items():
            if folder in unmarked:
                print(f"{folder} cannot be marked as cancelled ({unmarked[folder]}): it is ended at once", file=sys.stderr)
            ending.ask(at_once or folder in unmarked)
            new.pop(folder, None)
    except (EnvironmentRefuses, OSError):
        for run_folder in new.values():
            run_folder.cancelled.unlink(missing_ok=True)
        raise


def _end(endings: list[_Ending], *, at_once: bool, within_s: float) -> bool:
    """Wait until all have ended that were asked to, and ask again and again; tell whether they have."""
    deadline, asked = time.monotonic() + within_s, time.monotonic()
    while endings := [each for each in endings if not _is_over(each)]:
        if time.monotonic() > deadline:
            return False
        if time.monotonic() - asked >= _SIGNAL_EVERY_S:
            asked = time.monotonic()
            for each in endings:
                with suppress(EnvironmentRefuses):
                    each.ask(at_once)
        time.sleep(_POLL_S)
    return True


def _is_over(ending: _Ending) -> bool:
    with suppress(EnvironmentRefuses):  # a controller that is being restarted
        return ending.has_ended()
    return False


def _has_ended(run_folder: RunFolder) -> bool:
    state = submitted_state(run_folder)
    if isinstance(state, str):
        raise EnvironmentRefuses(happened=state, fix="try again in a minute")
    return state is None or (isinstance(state, State) and state.stage is Stage.ENDED)


def _refuse_job_of_a_sweep(path: Path) -> None:
    """Refuse to cancel one job of a sweep that works on it: it would come to the job again, or have its result."""
    sweep = None if is_sweep(path) else sweep_of(path)
    if sweep is not None and is_held(sweep) and Submission.read(RunFolder(path)) is None:
        raise ConfigError(happened=f"{path} is a job of a sweep that is running", fix=f"ddp-train cancel {shlex.quote(str(sweep))}")
