"""starts.json: how often a run was started without a new checkpoint, by an agent, a scheduler or a script.

After `MAX_STARTS_WITHOUT_CHECKPOINT` the run is not started again: exit code 93. Not counted are attempts with a mistake that a person has
to fix, and those that were stopped before they could save, unless an engine made them: it would start the run again for ever.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from ddp_train.errors import FINAL, NO_PROGRESS
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.files import write_json

MAX_STARTS_WITHOUT_CHECKPOINT = 4
NO_PROGRESS_ERROR = "NoProgress"  # the error's name in the files of a run, after the last of them
_SHOWN = 100  # characters of an error


class _CountedBy(StrEnum):
    """Who has counted the attempt that has not ended yet."""

    NONE = ""  # all attempts have ended
    ENGINE = "engine"
    RANKS_OF_ENGINE = "ranks of an engine"  # the engine's program first
    RANKS = "ranks"


@dataclass(frozen=True, kw_only=True)
class NoProgress:
    """Why a run is not to be started again: none of its last attempts has saved a checkpoint."""

    checkpoint: int  # step of the newest one; 0: there is none
    step: int | None  # after which the last attempt failed, where that is known
    endings: list[str]  # how each attempt ended

    def show(self, run_folder: RunFolder) -> None:
        print(self.screen(run_folder), file=sys.stderr, flush=True)

    def screen(self, run_folder: RunFolder) -> str:
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
    open: str = _CountedBy.NONE

    def write(self, run_folder: RunFolder) -> None:
        if self.began:
            write_json(run_folder.starts, asdict(self))
        else:
            run_folder.starts.unlink(missing_ok=True)

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


@dataclass(frozen=True)
class AttemptCount:
    """Counts the attempts of a run since its newest checkpoint, in starts.json. An attempt is open until a call records its end.

        call                  open before              count                            open after
        begin_under_engine    any                      +1                               ENGINE
        begin                 ENGINE                   as it is                         RANKS_OF_ENGINE
                              any other                +1                               RANKS
        finish                any                      0 if saved, else -1 for RANKS    NONE
        fail                  any                      +1 for NONE; judged              NONE
        close_unfinished      RANKS, RANKS_OF_ENGINE   judged                           NONE
                              NONE, ENGINE             as it is                         as it is
        close_before_requeue  any                      judged                           NONE

    To judge takes 1 off for a failure that a person has to fix, and returns `NoProgress` where the count is too high: no other attempt may
    begin. That comes once, with `failed` in result.json; then the count begins anew, for a person who has fixed the cause.
    """

    run_folder: RunFolder

    def begin_under_engine(self) -> None:
        """Count an attempt before an engine starts the machines, and archive the failure of the one before it. May raise OSError."""
        self.run_folder.archive_failure()
        starts = self._load()
        starts.began.append(time.time())
        starts.open = _CountedBy.ENGINE
        starts.write(self.run_folder)

    def begin(self) -> None:
        """Count an attempt of ranks (rank 0), unless an engine has counted it."""
        starts = self._load()
        if starts.open == _CountedBy.ENGINE:
            starts.open = _CountedBy.RANKS_OF_ENGINE
        else:
            starts.began.append(time.time())
            starts.open = _CountedBy.RANKS
        with suppress(OSError):  # a full disk: the run will say so itself
            starts.write(self.run_folder)

    def finish(self, *, is_saved: bool = True) -> None:
        """Record that the attempt has completed, or stopped in good order (rank 0). Unless it has saved, earlier ones still count."""
        starts = self._load()
        if is_saved:
            starts.began.clear()
        elif starts.open == _CountedBy.RANKS:
            starts.began.pop()
        starts.open = _CountedBy.NONE
        starts.write(self.run_folder)

    def fail(self) -> NoProgress | None:
        """Record that the attempt has failed, also where that was before rank 0 could count it. For who has seen all ranks end."""
        return self._close(counts_uncounted=True)

    def close_unfinished(self, *, counts_anew: bool = False) -> NoProgress | None:
        """Before another attempt: record the failure of one of ranks whose end no process has recorded."""
        if counts_anew:  # a person has chosen the checkpoint
            self.run_folder.starts.unlink(missing_ok=True)
        has_begun = self._load().open in (_CountedBy.RANKS, _CountedBy.RANKS_OF_ENGINE)  # an engine counts what is about to begin
        return self._close() if has_begun else None

    def close_before_requeue(self) -> NoProgress | None:
        """Before an engine starts the machines once more: record the failure of any attempt whose end no process has recorded."""
        return self._close()

    def _close(self, *, counts_uncounted: bool = False) -> NoProgress | None:
        run_folder = self.run_folder
        starts = self._load()
        files = run_folder.root.glob("failure*.json")  # reports of all attempts: failure.json, failure.1.json ...
        reports = sorted(filter(None, map(failure.load_report, files)), key=lambda report: report.time)
        last = reports[-1] if reports and (not starts.began or reports[-1].time >= starts.began[-1]) else None
        if counts_uncounted and starts.open == _CountedBy.NONE:
            starts.began.append(last.time if last else time.time())
        starts.open = _CountedBy.NONE
        if last is not None and last.exit_code in FINAL and starts.began:  # a person has to fix something before the next one
            starts.began.pop()
        no_progress = starts.judge(reports)
        if no_progress is None:
            with suppress(OSError):  # a full disk
                starts.write(run_folder)
            return None
        run_folder.starts.unlink(missing_ok=True)
        with suppress(OSError):
            error = f"{NO_PROGRESS_ERROR}: {no_progress.endings[-1]}"
            Result(status=Status.FAILED, step=no_progress.step, error=error, has_no_progress=True).write(run_folder.result)
        return no_progress

    def _load(self) -> _Starts:
        starts = _Starts()
        with suppress(OSError, ValueError, TypeError):
            starts = _Starts(**json.loads(self.run_folder.starts.read_text()))
        newest = max(self.run_folder.saved_steps(), default=0)
        return starts if starts.checkpoint == newest else _Starts(checkpoint=newest, began=starts.began[-1:], open=starts.open)
