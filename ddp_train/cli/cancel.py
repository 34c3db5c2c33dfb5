"""`ddp-train cancel`: let a run, or the runs of a sweep, save and end; only a person starts them again."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ddp_train.cli.saved_run import parse_words
from ddp_train.cli.status import runs_of
from ddp_train.config.saved import saved_config
from ddp_train.errors import DONE, FAILED, ConfigError, EnvironmentRefuses
from ddp_train.launch.engine.engine import Stage, State, Submission, engine_of, submitted_state
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.sweep import sweep_of
from ddp_train.run_folder.verdict import mark_cancelled
from ddp_train.system.folder_lock import holder_of, is_here, is_locked

USAGE = """ddp-train cancel RUN [--at-once]

  RUN            a run folder, or the folder of a sweep: queued jobs are removed from the queue, running ones save and end
  --at-once      end it now, without waiting for a save
"""

_POLL_S = 1.0
_SIGNAL_EVERY_S = 5.0  # again and again: a signal between two steps of a SLURM job reaches no process
_PATIENCE_S = 60.0  # beyond cluster.grace_s


def cancel(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train cancel RUN-or-SWEEP [--at-once]`: end it, and wait until it has ended."""
    options, (typed,) = parse_words(arguments, USAGE, {"--at-once": ""})
    path, at_once, quoted = Path(typed).absolute(), "--at-once" in options, shlex.quote(typed)
    runs = [run_folder for run_folder, _ in runs_of(path) if not run_folder.is_completed()]
    if not runs:
        print(f"{quoted} is done: there is nothing to cancel")
        return DONE
    sweep = None if is_sweep(path) else sweep_of(path)
    if sweep is not None and is_locked(sweep) and Submission.read(RunFolder(path)) is None:  # it would start the job again
        raise ConfigError(happened=f"{path} is a job of a sweep that is running", fix=f"ddp-train cancel {shlex.quote(str(sweep))}")
    candidates = {run_folder.root: _work_of(run_folder) for run_folder in runs}  # before anything is marked: it may run elsewhere
    candidates |= {path: _local_process(path)} if is_sweep(path) else {}
    works = {folder: work for folder, work in candidates.items() if work is not None}
    grace_s = max((saved_config(run.root)["cluster"]["grace_s"] for run in runs if run.config.exists()), default=0)
    _mark_and_stop(runs, works, at_once=at_once)
    if not _wait_for_all(list(works.values()), at_once=at_once, within_s=grace_s + _PATIENCE_S):
        print(f"{quoted} has not ended yet; `ddp-train cancel {quoted} --at-once` does not wait for it to save", file=sys.stderr)
        return FAILED
    print(f"cancelled; `ddp-train resume {quoted}` continues it" + (f" {runs[0].resume_point_text()}" if len(runs) == 1 else ""))
    return DONE


class _Work(NamedTuple):
    """An engine's job or a process of this machine, which is to be stopped."""

    stop: Callable[[bool], None]  # True: at once
    has_ended: Callable[[], bool]


def _work_of(run_folder: RunFolder) -> _Work | None:
    """Return the job or the process of a run; None where there is neither."""
    submission = Submission.read(run_folder)
    if submission is not None and not _has_ended(run_folder):
        engine, id = engine_of(submission.engine), submission.id
        return _Work(lambda at_once: engine.stop(id, at_once=at_once), lambda: _has_ended(run_folder))
    return _local_process(run_folder.root)


def _local_process(folder: Path) -> _Work | None:
    """Return the process that has locked a folder; None: none has. EnvironmentRefuses: it runs on another machine."""
    holder = holder_of(folder)
    if holder is None or not is_locked(folder):
        return None
    if not is_here(holder):
        happened = f"the process of {folder} runs on {holder.host} (pid {holder.pid})"
        raise EnvironmentRefuses(happened=happened, expected="the same command on that machine", fix=f"ssh {holder.host} kill {holder.pid}")
    once = [signal.SIGTERM]

    def stop(at_once: bool) -> None:
        if once or at_once:
            with suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGQUIT if at_once else once.pop())

    return _Work(stop, lambda: not is_locked(folder))


def _mark_and_stop(runs: Sequence[RunFolder], works: Mapping[Path, _Work], *, at_once: bool) -> None:
    """Mark runs as cancelled, and stop their work. Marked first: a scheduler may ask for the verdict as soon as it ends.

    Where one cannot be marked or stopped, it and those after it lose their marks: they go on.
    """
    new = {run_folder.root: run_folder for run_folder in runs if not run_folder.cancelled.exists()}
    try:
        for run_folder in runs:
            mark_cancelled(run_folder)
        for folder, work in works.items():
            work.stop(at_once)
            new.pop(folder, None)
    except (EnvironmentRefuses, OSError):
        for run_folder in new.values():
            run_folder.cancelled.unlink(missing_ok=True)
        raise


def _wait_for_all(works: list[_Work], *, at_once: bool, within_s: float) -> bool:
    """Wait until all have ended, and stop them again now and then; tell whether they have ended."""
    deadline, stopped = time.monotonic() + within_s, time.monotonic()
    while works := [work for work in works if not _is_over(work)]:
        if time.monotonic() > deadline:
            return False
        if time.monotonic() - stopped >= _SIGNAL_EVERY_S:
            stopped = time.monotonic()
            for work in works:
                with suppress(EnvironmentRefuses):
                    work.stop(at_once)
        time.sleep(_POLL_S)
    return True


def _is_over(work: _Work) -> bool:
    with suppress(EnvironmentRefuses):  # a controller that is being restarted
        return work.has_ended()
    return False


def _has_ended(run_folder: RunFolder) -> bool:
    state = submitted_state(run_folder)
    if isinstance(state, str):
        raise EnvironmentRefuses(happened=state, fix="try again in a minute")
    return state is None or (isinstance(state, State) and state.stage is Stage.ENDED)
