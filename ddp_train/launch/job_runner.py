"""Where jobs run: what a runner of jobs and the slots of a sweep offer to those who have jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


MakeSlots = Callable[[Path, int], Sequence[Slot]]  # gives so many slots; the path is the folder for the logs of torch's agents


@dataclass(kw_only=True)
class JobRunner:
    """Where jobs run: on this machine, or in the group of ranks that torchrun started."""

    run_job: Callable[[Job], int]  # one job, to its end; returns the exit code
    slots: MakeSlots  # for the jobs of a sweep
    tell_caller: Callable[[str, str], bool] = lambda name, value: False  # "folder" of a run that begins, or "error"; False: there is none
    begun_folder: Path | None = None  # the run or sweep that it was given: what goes wrong from now on is no mistake of the command line

    def run_to_end(self, job: Job, rendezvous: NodeRendezvous | None = None) -> int:
        """Run a job to its end, with the machines that come to `rendezvous` (`meet`), and return its exit code."""
        self.begun_folder = job.run_folder.root
        self.tell_caller("folder", str(self.begun_folder))
        if rendezvous is None:
            return self.run_job(job)
        from ddp_train.launch import machines  # with what each of several machines runs, which takes its time to import

        return machines.lead(rendezvous, job)

    def begin_sweep(self, folder: Path, count: int, *, make: MakeSlots | None = None) -> Sequence[Slot]:
        """Return the slots for the jobs of a sweep, which are run at once; `make`: of an engine, in the place of the runner's own."""
        slots = (make or self.slots)(folder, count)
        self.begun_folder = folder
        return slots


def meet(config: RunConfig, *, run_identity: str) -> NodeRendezvous | None:
    """Meet the other machines of a run (`run_identity`: `NodeFacts.run`); the first one claims the folder. None: this machine is alone."""
    if config.cluster.launcher != "machines":
        return None
    from ddp_train.launch import machines  # as above

    return machines.meet(config.cluster, run=run_identity)


def take_part(rendezvous: NodeRendezvous | None, config: RunConfig) -> int | None:
    """Take part in a run that another machine leads, to its end, and return the exit code. None: this one is alone, or the first."""
    if rendezvous is None or rendezvous.is_first:
        return None
    from ddp_train.launch import machines  # as above

    return machines.take_part(rendezvous, config)
