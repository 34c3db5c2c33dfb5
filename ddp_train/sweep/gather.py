"""What became of the jobs of a sweep by now: from their folders, and from the engine that has some of them still."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_train.errors import INTERRUPTED, UserError
from ddp_train.launch.engine.engine import Stage, Submission
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import Sweep, SweepJob
from ddp_train.run_folder.verdict import Outcome, verdict_of


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What the engines say."""

    alive: set[int] = field(default_factory=set)  # the numbers of the jobs that wait in a queue, or run
    problems: list[str] = field(default_factory=list)  # of engines that cannot be asked now


def gather(sweep: Sweep, metric: str | None) -> Gathered:
    """Bring the jobs of a sweep up to date.

    Args:
        metric: as in `Sweep.read_result`.
    """
    found = Gathered()
    for job in sweep.jobs:
        sweep.read_result(job, metric)
        submission = Submission.read(sweep.run_folder(job)) if job.status != Status.COMPLETED else None
        if submission is None:
            continue
        try:
            state = submission.state(sweep.run_folder(job))
        except UserError as error:
            found.problems.append(f"{submission.engine}, job {submission.id}: {error.happened}")
            continue
        if state.stage is Stage.ENDED:
            _read_end(sweep, job, metric)
        else:
            job.status = Status.QUEUED if state.stage is Stage.QUEUED else Status.RUNNING
            found.alive.add(job.number)
    return found


def _read_end(sweep: Sweep, job: SweepJob, metric: str | None) -> None:
    """Take over how a job ended, which may have been just now. One that nobody starts again has failed, unless a person stopped it."""
    sweep.read_result(job, metric)
    verdict = verdict_of(sweep.run_folder(job))
    if verdict.outcome is Outcome.NEVER and verdict.exit_code != INTERRUPTED:
        job.status = Status.FAILED
