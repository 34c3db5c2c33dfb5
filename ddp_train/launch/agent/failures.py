"""The failures of an agent's ranks: it records why they ended, decides whether all are started again, and shows how a failed run ends.

It shows the one screen that the failing rank left, or says itself which rank died of what.
"""

import sys
import time
from collections.abc import Mapping
from typing import Protocol

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_train.errors import FAILED, FINAL, NO_PROGRESS
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.starts import AttemptCount, NoProgress
from ddp_train.system.process import oom_kills, ran_out


class FailureHandler(Protocol):
    """What an agent does about failures. Made before the ranks are started."""

    def handle(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        """Record failures, by rank, and tell whether the ranks are started again."""

    def end(self, error: ChildFailedError) -> int:
        """Say that the ranks have failed and are not started again, and return the exit code of the run."""


class FailuresOfRun:
    """The failures of an agent that is alone: it decides on restarts."""

    def __init__(self, run_folder: RunFolder | None, *, in_sweep: bool) -> None:
        self._run = _AgentRun(run_folder)
        self._in_sweep = in_sweep  # which shows failures itself
        self._no_progress: NoProgress | None = None  # why a restart would get no further

    def handle(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        if self._run.has_ended() or restarts_left == 0:
            return False
        self._run.record_first(failures)
        if _code(failures) in FINAL:
            return False
        if self._run.folder is not None:
            self._no_progress = AttemptCount(self._run.folder).fail()
        return self._no_progress is None

    def end(self, error: ChildFailedError) -> int:
        folder, report = self._run.folder, self._run.report_on(error)
        if folder is None or report is None:
            return _code(error.failures)
        if self._in_sweep:
            self._run.record(report)
        elif self._no_progress is None:
            if self._run.record(report):
                self._run.show(report)
            self._no_progress = AttemptCount(folder).fail()
        if self._no_progress is None:
            return _code(error.failures)
        if not self._in_sweep:
            self._no_progress.show(folder)
        return NO_PROGRESS


class FailuresOfAttempt:
    """The failures of an agent for one attempt on several machines. The first machine decides what follows; `is_last`: nothing follows."""

    def __init__(self, run_folder: RunFolder | None, *, is_last: bool) -> None:
        self._run = _AgentRun(run_folder)
        self._is_last = is_last
        self._has_recorded = False  # it was this agent that wrote failure.json

    def handle(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        """Record at once why the ranks have ended: those of other machines wait for it, and would name this one's neighbours otherwise."""
        if not self._run.has_ended():
            self._has_recorded = self._run.record_first(failures)
        return False

    def end(self, error: ChildFailedError) -> int:
        report = self._run.report_on(error)
        if report is not None and (self._has_recorded or self._run.record(report)) and self._is_last:
            self._run.show(report)
        return _code(error.failures)


class _AgentRun:
    """The run that an agent's ranks work on, and its changes since the agent was made; `folder` None: there is no run."""

    def __init__(self, folder: RunFolder | None) -> None:
        self.folder = folder
        self._began = time.monotonic()
        self._kills_before = oom_kills()
        self._result_before = None if folder is None else folder.read_result()

    def has_ended(self) -> bool:
        """Tell whether the run was completed or stopped since this agent was made: a rank that dies after that changes nothing."""
        return self.folder is not None and self.folder.has_ended_since(self._result_before)

    def record_first(self, failures: Mapping[int, ProcessFailure]) -> bool:
        """Record the first failure if its rank has written no report itself; tell whether it was recorded here."""
        rank, first = _first_of(failures)
        report = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=self.folder)
        return self.folder is not None and report.record(self.folder)

    def report_on(self, error: ChildFailedError) -> failure.Failure | None:
        """Return the report on a run that has failed. None: no run has, as it had ended before or there is none; then say who died."""
        rank, first = error.get_first_failure()
        ran_oom = ran_out(self._kills_before)
        report = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=self.folder, was_out_of_memory=ran_oom)
        if self.has_ended():
            print(f"{report.who} died after the run had ended: {report.message}", file=sys.stderr, flush=True)
        elif self.folder is not None:
            others = {other: process.pid for other, process in error.failures.items() if other != rank}
            return report.with_others(failure.last_activities(self.folder, others))
        elif first.exitcode < 0:
            print(f"\nThe run failed: rank {rank} on {report.host} (pid {report.pid}): {report.message}", file=sys.stderr, flush=True)
        return None

    def record(self, report: failure.Failure) -> bool:
        """Record the failure unless a rank has; tell whether it was recorded here."""
        return self.folder is not None and report.record(self.folder, seconds=time.monotonic() - self._began)

    def show(self, report: failure.Failure) -> None:
        if self.folder is not None and self.folder.failure.exists():  # else the disk is full, and the rank has shown its screen
            print(report.screen(self.folder), file=sys.stderr, flush=True)


def _first_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    return min(failures.items(), key=lambda item: item[1].timestamp)


def _code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the run: the one of a rank that says what a person has to do, or that of the first that failed."""
    return next((each.exitcode for each in failures.values() if each.exitcode in FINAL), max(FAILED, _first_of(failures)[1].exitcode))
