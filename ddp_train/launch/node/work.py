"""What the machines of a run do together: one job, or what a command line asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ddp_train.config.saved import answers_before
from ddp_train.config.schema import ClusterConfig
from ddp_train.job import Job
from ddp_train.launch.node.facts import Facts
from ddp_train.run_folder.paths import RunFolder


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one machine knows of it when it comes."""

    cluster: ClusterConfig
    processes: int  # on this machine
    facts: Facts
    max_restarts: int  # the first machine's count
    token: str = ""  # who has another one is of another run
    job: Job | None = None  # the first machine's; it sends it to the others. None: rank 0 composes what `arguments` ask for
    arguments: Sequence[str] = field(default_factory=list)

    @property
    def run_folder(self) -> RunFolder | None:
        """Where the run is; None: nobody knows it before rank 0 has composed, or it is no run that is recorded."""
        return None if self.job is None else self.job.record


def on_ranks(job: Job, world_size: int) -> Job:
    """Return the same job for another number of ranks, and write its config down.

    Raises:
        ConfigError: there are more ranks than samples in a batch.
    """
    config = job.config.on(world_size)
    if config is not job.config:
        job.run_folder.record_config(config.yaml(answers_before(config, job.run_folder.root)))
    return replace(job, config=config)
