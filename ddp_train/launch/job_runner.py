"""Where jobs run: what a runner of jobs and the slots of a sweep offer to those who have jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddp_train.config.run_config import RunConfig
from ddp_train.launch.job import Job

if TYPE_CHECKING:
    from ddp_train.launch.node.this_node import NodeRendezvous


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

    begun_folder: Path | None = None  # the run or sweep that it was given: what goes wrong from now on is no mistake of the command line
    _rendezvous: NodeRendezvous | None = None  # where the other machines come that this one, the first, leads

    @abstractmethod
    def launch_job(self, job: Job) -> int:
        """Run a job to its end, and return its exit code."""

    @abstractmethod
    def slots(self, folder: Path, count: int) -> Sequence[Slot]:
        """Return so many slots for the jobs of a sweep, which are run at once; `folder`: for the logs of torch's agents."""

    def tell_caller(self, name: str, value: str) -> bool:
        """Tell the "folder" of a run that begins, or an "error", to the program that has started this command; False: there is none."""
        return False

    def follow_first_machine(self, config: RunConfig, *, run_identity: str) -> int | None:
        """Meet the other machines of a run, and take part to its end where another one leads it; return the exit code.

        None: this machine is alone, or the first, which claims the folder and gives the job to `run_to_end`. `run_identity`: which run
        this machine comes for (`NodeFacts.run`).
        """
        if config.cluster.launcher != "machines":
            return None
        from ddp_train.launch import machines  # with what each of several machines runs, which takes its time to import

        self._rendezvous = machines.meet_machines(config.cluster, run=run_identity)
        return machines.follow(self._rendezvous, config) if self._rendezvous is not None and not self._rendezvous.is_first else None

    def run_to_end(self, job: Job) -> int:
        """Run a job to its end, with the machines that this one leads, and return its exit code."""
        self.begun_folder = job.run_folder.root
        self.tell_caller("folder", str(self.begun_folder))
        if self._rendezvous is None:
            return self.launch_job(job)
        from ddp_train.launch import machines  # as above

        return machines.lead(self._rendezvous, job)


class CommandLine(Protocol):
    """What ranks need of `cli.main`, which lies above them."""

    def run(self, words: Sequence[str], runner: JobRunner) -> int: ...

    def resume(self, folder: Path, runner: JobRunner) -> int: ...
