"""starts.json: how often a run was started without a new checkpoint, by an agent, a scheduler or a script.

After `MAX_STARTS_WITHOUT_CHECKPOINT` without a new checkpoint the run is not started again: exit code 93. Two kinds of attempts are not
counted: one with a mistake that a person has to fix, and one that was stopped before it could save, unless an engine made it: the engine
would start the run again for ever.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field

from ddp_train.errors import FINAL, NO_PROGRESS
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.files import write_json

MAX_STARTS_WITHOUT_CHECKPOINT = 4
NO_PROGRESS_ERROR = "NoProgress"  # the error in result.json begins so after the last of them
_SHOWN = 100  # characters of an error
_ENGINE, _RANKS_OF_ENGINE, _RANKS = "engine", "ranks of an engine", "ranks"  # who has counted an attempt (`_Starts.open`)


@dataclass(frozen=True, kw_only=True)
class NoProgress:
    """Why a run is not to be started again: none of its last attempts has saved a checkpoint."""

    checkpoint: int  # step of the newest one; 0: there is none
    step: int | None  # after which the last attempt failed, where that is known
    endings: list[str]  # how each attempt ended

    def show(self, run_folder: RunFolder) -> int:
        """Print it, and return the exit code of the run."""
        print(self.screen(run_folder), file=sys.stderr, flush=True)
        return NO_PROGRESS

    def screen(self, run_folder: RunFolder) -> str:
        """Return what is shown to a person."""
        origin = f"its checkpoint of step {self.checkpoint}" if self.checkpoint else "the start"
        head = f"No progress: the run was started again {len(self.endings) - 1} times from {origin} without a new checkpoint"
        numbered = [f"  {number}  {ending}" for number, ending in enumerate(self.endings, 1)]
        fix = f"  fix: fix it before it runs again (exit code {NO_PROGRESS}: do not requeue); `{run_folder.resume_command()}` counts anew"
        return "\n".join(["", head, "", *numbered, "", f"  reports  {run_folder.as_typed()}/failure*.json", fix, ""])


@dataclass
class _Starts:
    """The content of starts.json."""

    checkpoint: int = 0  # step of the newest one
    began: list[float] = field(default_factory=list)  # times of the attempts without a newer one, in seconds since the epoch
    open: str = ""  # who has counted the attempt that has not ended yet; "": there is none

    def write(self, run_folder: RunFolder) -> None:
        if self.began:
            write_json(run_folder.starts, asdict(self))
        else:
            run_folder.starts.unlink(missing_ok=True)

    def close(self, reports: Sequence[failure.Failure], *, has_failed: bool) -> None:
        """Count the attempt that has failed, unless a person has to fix something before the next one."""
        last = reports[-1] if reports and (not self.began or reports[-1].time >= self.began[-1]) else None
        if has_failed and not self.open:  # it failed before rank 0 could count
            self.began.append(last.time if last else time.time())
        self.open = ""
        if last is not None and last.exit_code in FINAL and self.began:
            self.began.pop()

    def judge(self, reports: Sequence[failure.Failure]) -> NoProgress | None:
        """Return why the run is not to be started again, where its attempts were too many."""
        if len(self.began) < MAX_STARTS_WITHOUT_CHECKPOINT:
            return None
        endings, step = [], None
        for began, next_began in zip(self.began, [*self.began[1:], float("inf")], strict=True):
            report = next((report for report in reports if began <= report.time < next_began), None)
            step = report.step if report else None
            after = "" if step is None else f"after step {step}: "
            endings.append(f"{after}{report.who}: {report.line(_SHOWN)}" if report else "everything ended without a report")
        return NoProgress(checkpoint=self.checkpoint, step=step, endings=endings)


def count_attempt(run_folder: RunFolder, *, by_engine: bool = False) -> None:
    """Count an attempt. Rank 0 calls this at its begin; under an engine the program that starts the machines has counted it before.

    `by_engine`: also move away the result and report of earlier attempts: later ones are of this one. Only then it raises OSError.
    """
    if by_engine:
        run_folder.archive_failure()
    starts = _load(run_folder)
    if not by_engine and starts.open == _ENGINE:
        starts.open = _RANKS_OF_ENGINE
    else:
        starts.began.append(time.time())
        starts.open = _ENGINE if by_engine else _RANKS
    with nullcontext() if by_engine else suppress(OSError):  # a full disk: the run will say so itself
        starts.write(run_folder)


def end_attempt(run_folder: RunFolder, *, is_saved: bool = True) -> None:
    """Record that the attempt has completed, or stopped in good order (rank 0). Unless it has saved, earlier ones still count."""
    starts = _load(run_folder)
    if is_saved:
        starts.began.clear()
    elif starts.open == _RANKS:
        starts.began.pop()
    starts.open = ""
    starts.write(run_folder)


def close_if_unfinished(run_folder: RunFolder) -> NoProgress | None:
    """Record that the last attempt has failed if no process has recorded its end, and not one that an engine's program has counted.

    As the two below it returns why the run is not to be started again, if so. The reason comes once, with `failed` in result.json; then the
    count begins anew, for a person who has fixed the cause.
    """
    starts = _load(run_folder)
    return None if starts.open in ("", _ENGINE) else _close(run_folder, starts, has_failed=False)


def close_before_launch(run_folder: RunFolder) -> NoProgress | None:
    """Record that the last attempt is over, also one that an engine's program has counted: it asks before it starts the machines."""
    return _close(run_folder, _load(run_folder), has_failed=False)


def close_failed(run_folder: RunFolder) -> NoProgress | None:
    """Record that the last attempt has failed, as the caller knows."""
    return _close(run_folder, _load(run_folder), has_failed=True)


def _close(run_folder: RunFolder, starts: _Starts, *, has_failed: bool) -> NoProgress | None:
    files = run_folder.root.glob("failure*.json")  # reports of all attempts: failure.json, failure.1.json ...
    reports = sorted(filter(None, map(failure.load_report, files)), key=lambda report: report.time)
    starts.close(reports, has_failed=has_failed)
    if (no_progress := starts.judge(reports)) is None:
        with suppress(OSError):  # a full disk
            starts.write(run_folder)
        return None
    run_folder.starts.unlink(missing_ok=True)  # the count begins anew
    with suppress(OSError):
        error = f"{NO_PROGRESS_ERROR}: {no_progress.endings[-1]}"
        Result(status=Status.FAILED, step=no_progress.step, error=error).write(run_folder.result)
    return no_progress


def _load(run_folder: RunFolder) -> _Starts:
    starts = _Starts()
    with suppress(OSError, ValueError, TypeError):
        starts = _Starts(**json.loads(run_folder.starts.read_text()))
    newest = max(run_folder.saved_steps(), default=0)
    return starts if starts.checkpoint == newest else _Starts(checkpoint=newest, began=starts.began[-1:], open=starts.open)
