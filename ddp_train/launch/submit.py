"""A job that was composed, checked and claimed goes to an engine: its code is copied, its spec frozen, its files rendered and submitted.

An engine is also a slot of a sweep's scheduler (`EngineSlot`). What a queue was given goes on without this process; a later one finds it by
RUN/launch/submitted.json.
"""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from ddp_train.config.cluster import processes_of_nodes
from ddp_train.errors import DONE, INTERRUPTED, PREEMPTED, ConfigError, EnvironmentRefuses, UserError
from ddp_train.launch import source_copy
from ddp_train.launch.engine.engine import NoAnswer, Stage, Submission, engine_of
from ddp_train.launch.fork_requests import early_fork_server
from ddp_train.launch.job import Job
from ddp_train.launch.source_copy import Code
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import newest_record
from ddp_train.run_folder.verdict import Outcome, mark_cancelled, verdict_after_end, verdict_of
from ddp_train.system.folder_lock import unlock_all

_ASK_EVERY_S = 10.0  # whether a job has ended; SLURM is shared by many who ask
_ASK_SOON_S = 1.0  # when the run's folder says that it has
_SUBMIT_EVERY_S = 30.0  # when the engine takes no more
_STOP_EVERY_S = 5.0  # to end: a signal that comes while a job is between two of its steps is lost


def submit_job(job: Job) -> int:
    """Submit a job; return 0 when that is done, or with cluster.wait the exit code of the run. In an allocation it runs at once."""
    early_fork_server.end()  # here: the machines of the job import for themselves
    engine, run_folder = engine_of(job.config.cluster.launcher), job.run_folder
    try:
        allocation = engine.allocation()
        spec = spec_of(job, source_copy.copy_source(run_folder.code, limit_mib=job.config.cluster.code_limit_mib))
        if allocation is not None and (before := spec.engine_options["after"]):
            happened = f"job {', '.join(before)} is not done, and allocation {allocation.id} would wait idle"
            fix = f"`ddp-train ... && {run_folder.resume_command()}`"
            raise ConfigError(key="after", happened=happened, expected="runs that are done", fix=fix)
        unlock_all()  # a machine of the job locks the folder
        if allocation is not None:
            spec.write()
            return allocation.run(spec)
        id = _submit([spec])
    except UserError as error:
        if not job.is_resumable:
            raise
        what = "the job may have been submitted" if isinstance(error, NoAnswer) else "nothing was submitted"
        print(f"\n{error}\n{what}; after the fix, run: {run_folder.resume_command()}", file=sys.stderr)
        return error.exit_code
    folder = shlex.quote(run_folder.as_typed())
    print(f"{'submitted as job' if engine.has_queue else 'started as'} {id}: {folder}")
    print(f"  ddp-train status {folder}   ddp-train logs -f {folder}   ddp-train cancel {folder}", flush=True)
    return engine.follow(run_folder, id) if job.config.cluster.wait else DONE


def submit_jobs(jobs: Sequence[Job], code: Code, *, parallel: int) -> str:
    """Submit jobs of a sweep to an engine, so many at a time, and return its id of them. Each folder says whether it was submitted."""
    early_fork_server.end()  # they import for themselves, too
    most = engine_of(jobs[0].config.cluster.launcher).most_runs() if len(jobs) > 1 else 1
    return _submit([spec_of(job, code, parallel=parallel, most_tasks=most) for job in jobs])


def _submit(specs: Sequence[Spec]) -> str:
    engine = engine_of(specs[0].engine)
    rendered = engine.render(specs)
    for id in dict.fromkeys(id for spec in specs for id in spec.engine_options["after"]):
        if (state := engine.state(id)).stage is Stage.ENDED:  # before it was done: SLURM would take the runs after it out at once
            happened = f"names a run that is not done, but its job {id} has ended{state.why and f' ({state.why})'}"
            raise ConfigError(key="after", happened=happened, fix="`ddp-train resume` that run first")
    for spec in specs:
        spec.write()
    return engine.submit(rendered)


def spec_of(job: Job, code: Code | None, **options: int) -> Spec:
    """Return the spec of a job for an engine."""
    cluster = job.config.cluster
    processes, step_ms = processes_of_nodes(cluster), newest_record(job.run_folder).get("step_ms")
    return Spec(
        job=job,
        engine=cluster.launcher,
        processes=processes,
        min_nodes=cluster.nodes.least if cluster.nodes else len(processes),
        code=code,
        engine_options={"python": sys.executable, "step_s": round((step_ms or 0.0) / 1000, 3), "after": _jobs_before(job), **options},
    )


def _jobs_before(job: Job) -> list[str]:
    """Return the engine's jobs that have to be done before this one begins (`after`); none for a run that has begun before."""
    ids = []
    for folder in [] if job.run_folder.environment.exists() else job.config.runs_before():
        if verdict_of(RunFolder(folder)).outcome is Outcome.DONE:
            continue
        submission = Submission.read(RunFolder(folder))
        if submission is None or submission.engine != job.config.cluster.launcher:
            happened = f"{folder} is not done, and is not a job of {job.config.cluster.launcher}"
            raise ConfigError(key="after", happened=happened, expected="runs that are done, or submitted to the same engine")
        ids.append(submission.id)
    return ids


def require_ended(folder: Path) -> None:
    """Refuse to start a run again that an engine has still: queued, or running."""
    run_folder = RunFolder(folder)
    submission = Submission.read(run_folder)
    if submission is None:
        return
    try:
        state = submission.state(run_folder)
    except EnvironmentRefuses as error:
        raise ConfigError(key="resume", happened=f"cannot find out whether {folder} is running: {error.happened}", fix=error.fix) from None
    if state.stage is not Stage.ENDED:
        fix = f"`ddp-train cancel {shlex.quote(run_folder.as_typed())}` first; a preempted run is requeued by itself"
        happened = f"{folder} is {state.stage} as job {submission.id}"
        raise ConfigError(key="resume", happened=happened, expected="a run that has ended", fix=fix)


class EngineSlot:
    """A slot whose jobs run wherever the engine of their section `cluster` has room; `take_code` copies the source, once for a sweep."""

    def __init__(self, take_code: Callable[[int], Code]) -> None:
        self._take_code = take_code
        self._running: _EngineJob | None = None

    def start(self, job: Job) -> None:
        """Take a job, or take it over where the engine has it already. Its processes are always new."""
        self._running = _EngineJob(job, self._take_code)

    def poll(self, timeout_s: float) -> int | None:
        """Return the exit code of the run, or None while the engine has it; PREEMPTED where it goes on without us."""
        assert self._running is not None
        time.sleep(timeout_s)
        return self._running.poll()

    def stop(self, number: int) -> None:
        """Let the job save and end, or at once; one that waits in a queue or runs from there goes on unless a person wants it to end."""
        assert self._running is not None
        self._running.signals.append(number)  # the next poll passes it on: this may be a signal handler

    def end(self) -> None:
        """Nothing is held here."""


class _EngineJob:
    """The job at hand of a slot. Its times are those of the monotonic clock; 0: it has not come to that."""

    def __init__(self, job: Job, take_code: Callable[[int], Code]) -> None:
        self._job = job
        self._take_code = take_code
        self._id: str | None = None  # None: not submitted yet
        self.signals: list[int] = []  # for the engine
        self._next_ask_at = 0.0
        self._asked_at = 0.0
        self._next_stop_at = 0.0
        self._printed = ""  # the last error
        self._begin()

    def poll(self) -> int | None:
        """Do what is due; return as `EngineSlot.poll` does."""
        if self.signals and (code := self._pass_on()) is not None:
            return code
        now, run_folder = time.monotonic(), self._job.run_folder
        is_soon = self._id is not None and run_folder.result.exists() and now - self._asked_at >= _ASK_SOON_S
        if now < self._next_ask_at and not is_soon:
            return None
        if self._id is None:
            self._begin()
        elif self._has_ended(self._id):
            return verdict_after_end(run_folder)[1]
        return None

    def _begin(self) -> None:
        """Submit the job, unless the engine has it. What cannot be told, or is not taken now, is tried again."""
        run_folder = self._job.run_folder
        self._next_ask_at = time.monotonic() + _SUBMIT_EVERY_S
        try:
            submission = Submission.read(run_folder)
            is_there = submission is not None and engine_of(submission.engine).state(submission.id).stage is not Stage.ENDED
            if submission is not None and (is_there or run_folder.is_completed()):
                self._id = submission.id
            else:
                run_folder.reopen()
                self._id = submit_jobs([self._job], self._take_code(self._job.config.cluster.code_limit_mib), parallel=1)
        except EnvironmentRefuses as error:
            if str(error) != self._printed:
                self._printed = str(error)
                print(f"{run_folder.as_typed()} is waiting: {error.happened}", file=sys.stderr, flush=True)
            return
        self._next_ask_at = self._asked_at = time.monotonic()

    def _has_ended(self, id: str) -> bool:
        self._asked_at = time.monotonic()
        self._next_ask_at = self._asked_at + _ASK_EVERY_S
        try:
            return engine_of(self._job.config.cluster.launcher).state(id).stage is Stage.ENDED
        except EnvironmentRefuses:  # a controller that is being restarted
            return False

    def _pass_on(self) -> int | None:
        """Tell the engine what this process was told; return an exit code where that is the end of it here."""
        if self._id is None:  # it was not even submitted
            return INTERRUPTED if signal.SIGINT in self.signals else PREEMPTED
        engine, at_once = engine_of(self._job.config.cluster.launcher), signal.SIGKILL in self.signals
        if engine.has_queue and not at_once and signal.SIGINT not in self.signals:
            return PREEMPTED
        if time.monotonic() >= self._next_stop_at:
            if engine.has_queue:
                mark_cancelled(self._job.run_folder)  # else it would be requeued
            self._next_stop_at = time.monotonic() + _STOP_EVERY_S
            engine.stop(self._id, at_once=at_once)
            self._next_ask_at = min(self._next_ask_at, time.monotonic() + _ASK_SOON_S)
        return None


def slots(folder: Path, count: int) -> Sequence[EngineSlot]:
    """Return slots that share one copy of the source."""
    take_code = cache(lambda limit_mib: source_copy.copy_source_for_several(folder / "launch", limit_mib=limit_mib))
    return [EngineSlot(take_code) for _ in range(count)]
