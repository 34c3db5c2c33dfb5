"""The interfaces of what runs jobs: `JobRunner`, and a sweep's `Slot`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ddp_train.config.cluster import engine_name_of
from ddp_train.config.run_config import RunConfig
from ddp_train.errors import NO_PROGRESS
from ddp_train.launch.job import Job
from ddp_train.run_folder.starts import AttemptCount, NoProgress


class Slot(Protocol):
    """A place that runs one job of a sweep at a time: on this machine, on an engine, or in the processes that torchrun has started.

    Nothing here waits longer than it is told to, so that many slots share one loop.
    """

    def start(self, job: Job) -> None:
        """Begin a job."""

    def poll(self, timeout_s: float) -> int | None:
        """Return the exit code of the job, or None when it runs still, after at most `timeout_s`."""

    def stop(self, number: int) -> None:
        """Pass a stop signal on to the ranks, which save and end; SIGKILL ends them at once."""

    def end(self) -> None:
        """Let go of the processes; the slot can start a job again."""


class JobRunner(ABC):
    """Runs the jobs of a command: `cli.main.CommandRunner`, which starts their ranks, or the ranks of a user's torchrun."""

    def __init__(self) -> None:
        self.begun_folder: Path | None = None  # of the run or the sweep, once it has begun

    def note_begun(self, folder: Path) -> None:
        """Note that a run or a sweep has begun in its folder: what goes wrong from now on is no mistake of the command line."""
        self.begun_folder = folder

    def run_to_end(self, job: Job, *, is_restart: bool = False) -> int:
        """Begin a run, or let it go on, run its job to its end, and return the exit code. `is_restart`: of ranks that have just died."""
        self.note_begun(job.run_folder.root)
        if job.is_resumable and not is_restart:
            job.run_folder.reopen()
        if job.is_resumable and engine_name_of(job.config.cluster) is None:  # under an engine the first machine asks (`cli.node`)
            no_progress = AttemptCount(job.run_folder).close_unfinished(counts_anew=job.checkpoint is not None and not is_restart)
            if no_progress is not None:
                return self.end_without_progress(job, no_progress)
        return self.launch_job(job)

    def end_without_progress(self, job: Job, no_progress: NoProgress) -> int:
        """Show why a run is not to begin, and return the exit code."""
        no_progress.show(job.run_folder)
        return NO_PROGRESS

    @abstractmethod
    def launch_job(self, job: Job) -> int:
        """Run a job to its end, and return its exit code."""

    @abstractmethod
    def slots(self, folder: Path, count: int) -> Sequence[Slot]:
        """Return so many slots for the jobs of a sweep, which are run at once; `folder`: the sweep's."""

    def meet_machines(self, config: RunConfig, *, run: str) -> int | None:
        """Meet the other machines of a run, and follow the first one to the end: return the exit code of this command.

        None: this machine is the first one, or alone; it claims the folder, and its job is what all run. Ranks of an agent meet no machine.
        `run`: which run this machine comes for (`NodeFacts.run`).
        """
        return None

    def show_error(self, text: str) -> None:
        """Print an error that a person can mend."""
        print(text, file=sys.stderr)


class CommandLine(Protocol):
    """The functions of `cli.main`, in a layer above, that ranks call."""

    def run(self, words: Sequence[str], runner: JobRunner) -> int: ...

    def resume(self, folder: Path, runner: JobRunner) -> int: ...
