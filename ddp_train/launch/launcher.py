"""Where jobs run: what a launcher and the slots of a sweep offer to those who have jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddp_train.job import Job


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


MakeSlots = Callable[[Path, int], Sequence[Slot]]
"""Gives so many slots; the path is the folder for the logs of torch's agents."""


@dataclass(kw_only=True)
class Launcher:
    """Where jobs run: on this machine, or in the group of ranks that torchrun started."""

    run: Callable[[Job], int]  # one job, to its end; returns the exit code
    slots: MakeSlots  # for the jobs of a sweep
    begun: Path | None = None  # the run or sweep that it was given: what goes wrong from now on is no mistake of the command line

    def begin(self, job: Job) -> int:
        self.begun = job.run_folder.root
        return self.run(job)

    def begin_sweep(self, folder: Path, count: int, *, make: MakeSlots | None = None) -> Sequence[Slot]:
        """Return the slots for the jobs of a sweep, which are run at once.

        Args:
            make: those of an engine, in the place of the launcher's own.
        """
        made = (make or self.slots)(folder, count)
        self.begun = folder
        return made
