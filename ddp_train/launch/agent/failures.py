"""What an agent is told in addition to torchrun's options, and what it does about ranks that have failed.

Whether all are started again, and what the run folder and the screen say at the end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_train.errors import FAILED, FINAL, NO_PROGRESS
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.starts import check_progress
from ddp_train.system.process import oom_kills, ran_out

_NAMES = ("--grace-s=", "--run-dir=", "--group=", "--log=", "--restarts=", "--agent=")


@dataclass(frozen=True, kw_only=True)
class Options:
    """An agent's own options."""

    grace_s: int
    """`cluster.grace_s`."""
    run_folder: RunFolder | None
    """Of the run, where the agent has one."""
    group: Path | None
    """The folder of a sweep's ranks, in which a file names the folder of the job at hand."""
    log: Path | None
    """Where torch's own lines go; None: into the run folder."""
    restarts: int | None
    """How often the ranks of a run over several machines were started again: this agent starts them once and counts nothing; the first
    machine's node program decides what follows (`node/rounds.py`). None: this agent counts."""

    is_plain: bool = False
    """`cluster.agent=torch`: torchrun's own, with nothing of ours in it."""

    @property
    def in_round(self) -> bool:
        """Whether this is one start of all ranks of several machines."""
        return self.restarts is not None


def take_options(arguments: list[str]) -> Options:
    given = {}
    while option := next((name for name in _NAMES if arguments and arguments[0].startswith(name)), None):
        given[option] = arguments.pop(0).removeprefix(option)
    return Options(
        grace_s=int(given["--grace-s="]),
        run_folder=RunFolder(Path(given["--run-dir="])) if "--run-dir=" in given else None,
        group=Path(given["--group="]) if "--group=" in given else None,
        log=Path(given["--log="]) if "--log=" in given else None,
        restarts=int(given["--restarts="]) if "--restarts=" in given else None,
        is_plain=given.get("--agent=") == "torch",
    )


class Failures:
    """Of one agent's ranks. Made before they are started.

    Args:
        options: the agent's.
        is_last_round: no start of several machines' ranks follows this one.
    """

    def __init__(self, options: Options, *, is_last_round: bool) -> None:
        self._options, self._is_shown = options, not options.in_round or is_last_round
        self._began, self._kills_before = time.monotonic(), oom_kills()
        self._before = None if options.run_folder is None else options.run_folder.read_result()
        self._verdict: str | None = None  # on the last failure; "": the run gets further
        self._is_reported = False  # by this agent, in a round

    def again(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        """Tell whether the ranks are started again (`elastic.Again`)."""
        self._verdict, run_folder = None, self._options.run_folder
        if (restarts_left == 0 and not self._options.in_round) or self._has_ended():
            return False
        if run_folder is not None:
            rank, first = first_of(failures)
            found = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=run_folder)
            is_recorded = found.record(run_folder)  # if it left no word
            if self._options.in_round:  # at once: ranks of other machines wait for it, and would name this one's neighbours otherwise
                self._is_reported = is_recorded
                return False
            self._verdict = check_progress(run_folder, has_failed=True)
        return not self._options.in_round and not self._verdict and _code(failures) not in FINAL

    def end(self, error: ChildFailedError) -> int:
        """Say that the ranks have failed and are not started again, and return the exit code of the run."""
        rank, first = error.get_first_failure()
        found = failure.from_exit(
            rank=rank,
            pid=first.pid,
            exit_code=first.exitcode,
            run_folder=self._options.run_folder,
            was_out_of_memory=ran_out(self._kills_before),
        )
        if self._options.group is not None:
            _record_for_group(found, self._options.group)
        elif self._has_ended():
            print(f"{found.who} has died after the run had ended: {found.message}", file=sys.stderr, flush=True)
        elif self._options.run_folder is not None:
            others = {other: each.pid for other, each in error.failures.items() if other != rank}
            if self._end_run(self._options.run_folder, found.with_others(failure.last_words(self._options.run_folder, others))):
                return NO_PROGRESS
        elif first.exitcode < 0:
            print(f"\nThe run failed: rank {rank} on {found.host} (pid {found.pid}): {found.message}", file=sys.stderr, flush=True)
        return _code(error.failures)

    def _end_run(self, run_folder: RunFolder, found: failure.Failure) -> str:
        """Record and show the failure of a run; return the verdict if it makes no progress, else "". In a round others find the verdict."""
        is_first = self._is_reported or (not self._verdict and found.record(run_folder, seconds=time.monotonic() - self._began))
        if is_first and self._is_shown and os.path.exists(run_folder.failure):  # else the disk is full, and the rank has shown its screen
            print(found.screen(run_folder), file=sys.stderr, flush=True)
        if self._options.in_round:
            return ""
        verdict = check_progress(run_folder, has_failed=True) if self._verdict is None else self._verdict
        if verdict:
            print(verdict, file=sys.stderr, flush=True)
        return verdict

    def _has_ended(self) -> bool:
        """Tell whether a run was completed, or stopped in good order, since then: a rank that dies after that changes nothing."""
        run_folder = self._options.run_folder
        return run_folder is not None and failure.ended_since(run_folder, self._before) is not None


def first_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    return min(failures.items(), key=lambda item: item[1].timestamp)


def _code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the run: the one of a rank that says what a person has to do, or that of the first that failed."""
    said = [each.exitcode for each in failures.values() if each.exitcode in FINAL]
    return said[0] if said else max(FAILED, first_of(failures)[1].exitcode)


def _record_for_group(found: failure.Failure, group: Path) -> None:
    """Say in the folder of the job at hand why its group is gone; the launcher shows it."""
    job = group / "run_folder"
    run_folder = RunFolder(Path(job.read_text()))
    if not run_folder.is_completed():
        found.record(run_folder, seconds=time.time() - job.stat().st_mtime)
