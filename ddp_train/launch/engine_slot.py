"""An engine as a slot of a sweep's scheduler: each job is submitted when its turn comes, and asked for until it has ended.

What an engine with a queue was given goes on without this process. Whoever takes the sweep up finds it by RUN/launch/submitted.json.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from ddp_train.errors import INTERRUPTED, PREEMPTED, EnvironmentRefuses
from ddp_train.job import Job
from ddp_train.launch import snapshot
from ddp_train.launch.engine.engine import QUEUES, Stage, Submission, engine_of
from ddp_train.launch.spec import Code
from ddp_train.launch.submit import submit_jobs
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import WORD_WITHIN_S, Outcome, end_of, mark_cancelled

_ASK_EVERY_S = 10.0  # whether a job has ended; SLURM is shared by many who ask
_ASK_SOON_S = 1.0  # when the run's folder says that it has
_SUBMIT_EVERY_S = 30.0  # when the engine takes no more
_TELL_EVERY_S = 5.0  # to end: a signal that comes while a job is between two of its steps reaches nobody


class EngineSlot:
    """A slot whose jobs run wherever the engine of their section `cluster` has room.

    Args:
        take_code: copies the source, and returns what the copy is; the jobs of a sweep have one.
    """

    def __init__(self, take_code: Callable[[int], Code]) -> None:
        self._take_code = take_code
        self._job: Job | None = None
        self._id: str | None = None  # None: not submitted yet
        self._ask_at = self._tell_at = 0.0
        self._asked_at = self._ended_at = 0.0
        self._told: list[int] = []
        self._has_said = ""

    def start(self, job: Job, *, fresh: bool) -> None:
        """Take a job, or take it over where the engine has it already. Its processes are always new."""
        self._job, self._id, self._told = job, None, []
        self._ask_at = self._tell_at = self._ended_at = 0.0
        self._has_said = ""
        self._begin()

    def poll(self, timeout_s: float) -> int | None:
        """Return the exit code of the run, or None while the engine has it; PREEMPTED where it goes on without us."""
        assert self._job is not None
        time.sleep(timeout_s)
        if self._told and (code := self._pass_on()) is not None:
            return code
        now, run_folder = time.monotonic(), self._job.run_folder
        is_soon = self._id is not None and run_folder.result.exists() and now - self._asked_at >= _ASK_SOON_S
        if now < self._ask_at and not is_soon:
            return None
        if self._id is None:
            self._begin()
        elif self._has_ended(self._id):
            return self._end_of(run_folder)
        return None

    def stop(self, number: int) -> None:
        """Let the job save and end, or at once; one that waits in a queue or runs from there goes on unless a person wants it to end."""
        self._told.append(number)  # the next poll tells it: this may be a signal handler

    def end(self) -> None:
        """Nothing is held here."""

    def _begin(self) -> None:
        """Submit the job, unless the engine has it. What cannot be told, or is not taken now, is tried again."""
        assert self._job is not None
        run_folder = self._job.run_folder
        self._ask_at = time.monotonic() + _SUBMIT_EVERY_S
        try:
            submission = Submission.read(run_folder)
            is_there = submission is not None and engine_of(submission.engine).state(submission.id).stage is not Stage.ENDED
            if submission is not None and (is_there or run_folder.is_completed()):
                self._id = submission.id
            else:
                run_folder.cancelled.unlink(missing_ok=True)
                self._id = submit_jobs([self._job], self._take_code(self._job.config.cluster.code_limit_mib), parallel=1)
        except EnvironmentRefuses as error:
            if str(error) != self._has_said:
                self._has_said = str(error)
                print(f"{run_folder.shown()} waits: {error.happened}", file=sys.stderr, flush=True)
            return
        self._ask_at = self._asked_at = time.monotonic()

    def _has_ended(self, id: str) -> bool:
        assert self._job is not None
        self._asked_at = time.monotonic()
        self._ask_at = self._asked_at + _ASK_EVERY_S
        try:
            return engine_of(self._job.config.cluster.launcher).state(id).stage is Stage.ENDED
        except EnvironmentRefuses:  # a controller that is being restarted
            return False

    def _end_of(self, run_folder: RunFolder) -> int | None:
        """Return the exit code of a run that the engine has no more; None while its last word may still be on its way."""
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        verdict, code = end_of(run_folder, within_s=0.0)
        if verdict.outcome is Outcome.AGAIN and not run_folder.result.exists() and now < self._ended_at + WORD_WITHIN_S:
            self._ask_at = now + _ASK_SOON_S
            return None
        return code

    def _pass_on(self) -> int | None:
        """Tell the engine what this process was told; return an exit code where that is the end of it here."""
        assert self._job is not None
        if self._id is None:  # it was not even submitted
            return INTERRUPTED if signal.SIGINT in self._told else PREEMPTED
        has_queue, at_once = self._job.config.cluster.launcher in QUEUES, signal.SIGKILL in self._told
        if has_queue and not at_once and signal.SIGINT not in self._told:
            return PREEMPTED
        if time.monotonic() >= self._tell_at:
            if has_queue:
                mark_cancelled(self._job.run_folder)  # else it would be requeued
            self._tell_at = time.monotonic() + _TELL_EVERY_S
            engine_of(self._job.config.cluster.launcher).stop(self._id, at_once=at_once)
            self._ask_at = min(self._ask_at, time.monotonic() + _ASK_SOON_S)
        return None


def slots(folder: Path, count: int) -> Sequence[EngineSlot]:
    """Return so many slots for jobs of an engine, which share one copy of the source."""

    @cache
    def take_code(limit_mib: int) -> Code:
        return snapshot.take_for_several(folder / "launch", limit_mib=limit_mib)

    return [EngineSlot(take_code) for _ in range(count)]
