"""A place that runs one job of a sweep at a time: a worker group that this machine's agent started, or the one that torchrun did."""

from __future__ import annotations

from typing import Protocol

from ddp_train.job import Job


class Slot(Protocol):
    """One place. Nothing here waits longer than it is told to, so that many slots share one loop."""

    def start(self, job: Job, *, fresh: bool) -> None:
        """Begin a job.

        Args:
            fresh: in new processes, even if there are some that could serve it.
        """

    def poll(self, timeout_s: float) -> int | None:
        """Return the exit code of the job, or None when it runs still, after at most `timeout_s`."""

    def stop(self, number: int) -> None:
        """Pass a stop signal on to the ranks, which save and end."""

    def kill(self) -> None:
        """End the ranks at once."""

    def end(self) -> None:
        """Let go of the processes; the slot can start a job again."""
