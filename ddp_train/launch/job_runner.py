"""Where jobs run: what a runner of jobs and the slots of a sweep offer to those who have jobs."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ddp_train.config.run_config import RunConfig
from ddp_train.launch.job import Job


class Slot(Protocol):
    """A place that runs one job of a sweep at a time: the ranks that an agent of ours started, or those that torchrun did.

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
    """What a command gives its jobs to: `cli.main.CommandRunner`, which starts their ranks, or the ranks of a user's torchrun."""

    def __init__(self) -> None:
        self.begun_folder: Path | None = None  # of the run or the sweep, once it has begun

    def note_begun(self, folder: Path) -> None:
        """Note that a run or a sweep has begun in its folder: what goes wrong from now on is no mistake of the command line."""
        self.begun_folder = folder

    def run_to_end(self, job: Job) -> int:
        """Begin a run, run its job to its end, and return the exit code."""
        self.note_begun(job.run_folder.root)
        return self.launch_job(job)

    @abstractmethod
    def launch_job(self, job: Job) -> int:
        """Run a job to its end, and return its exit code."""

    @abstractmethod
    def slots(self, folder: Path, count: int) -> Sequence[Slot]:
        """Return so many slots for the jobs of a sweep, which are run at once; `folder`: for the logs of torch's agents."""

    def meet_machines(self, config: RunConfig, *, run_identity: str) -> None:  # noqa: B027  # ranks of an agent meet no machine
        """Meet the other machines of a run. The first one returns, and leads: it claims the folder, and its job is what all run.

        The others follow to the end. `SystemExit`: this machine has, and its command ends. A machine that is alone returns at once.
        `run_identity`: which run this machine comes for (`NodeFacts.run`).
        """

    def show_error(self, text: str) -> None:
        """Say what a person can mend, in the words of the message."""
        print(text, file=sys.stderr)


class CommandLine(Protocol):
    """What ranks need of `cli.main`, which lies above them."""

    def run(self, words: Sequence[str], runner: JobRunner) -> int: ...

    def resume(self, folder: Path, runner: JobRunner) -> int: ...
