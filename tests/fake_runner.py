"""A `JobRunner` for tests: it starts no ranks, and calls what it is given."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import JobRunner


class FakeRunner(JobRunner):
    def __init__(self, run: Callable[[Job], int] = lambda job: 0, slots: Callable[[Path, int], Sequence[Any]] = lambda folder, count: []):
        super().__init__()
        self._run, self._slots = run, slots

    def launch_job(self, job: Job) -> int:
        return self._run(job)

    def slots(self, folder: Path, count: int) -> Sequence[Any]:
        return self._slots(folder, count)
