"""The commands, files and variables with which a plan comes to life, as each launcher has them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from ddp_train.cli.plan_text import Screen
from ddp_train.config.cluster import meeting
from ddp_train.config.spelling import without_secrets
from ddp_train.job import Job
from ddp_train.launch import local
from ddp_train.launch.agent_process import rank_environment
from ddp_train.system import devices, handover

_WRITTEN = "config.yaml, .hydra, environment.json, metrics.jsonl, tensorboard, logs, checkpoints and result.json in each run folder"
_LINES_SHOWN = 4  # of machines that differ by their number alone


def show(screen: Screen, jobs: Sequence[Job]) -> None:
    """Show how jobs are started: those of a sweep, or one."""
    cluster = jobs[0].config.cluster
    screen.heading("How it is started")
    screen.table(_environment(jobs[0]))
    if cluster.launcher == "torchrun":
        screen.fact("type", *_on_each_machine(jobs[0]))
    elif len(jobs) == 1:
        screen.fact("agent", f"torchrun's, in a process that `ddp-train` forks, with {shlex.join(local.agent_arguments(jobs[0]))}")
    else:
        screen.fact("agent", "torchrun's, in a process that `ddp-train` forks; its ranks take one job after another")
    screen.fact("writes", f"{_WRITTEN}: docs/run_folder.md")
    screen.fact("ranks", f"{shlex.join([sys.executable, '-u', '-m', 'ddp_train'])}, started by the agent")


def _on_each_machine(job: Job) -> Iterator[str]:
    """Yield what is typed on each machine."""
    cluster = job.config.cluster
    found = meeting(cluster, os.environ)
    words = [text for text in job.command[1:] if not text.startswith("cluster.node_rank=")]

    def line(rank: str) -> str:
        return shlex.join(["ddp-train", *words, f"cluster.node_rank={rank}"])

    if cluster.node_rank is None and found.node_rank is not None:
        yield f"{shlex.join(['ddp-train', *words])}   on each machine; its number comes from the environment, and is {found.node_rank} here"
    elif found.max_nodes <= _LINES_SHOWN:
        yield from (line(str(rank)) for rank in range(found.max_nodes))
    else:
        yield f"{line('0')}   on the machine of {found.endpoint}"
        yield f"{line('N')}   on each other one, N from 1 to {found.max_nodes - 1}"


def _environment(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the variables that the ranks get, and why; secrets stay references."""
    cluster = job.config.cluster
    processes = devices.processes_per_node(cluster.processes_per_node, cluster.device)
    for name, value in rank_environment(processes, cluster.threads_per_process).items():
        yield (
            f"{name}={value}",
            "the cores of this machine, shared out" if cluster.threads_per_process is None else "cluster.threads_per_process",
        )
    for name, value in cluster.env.items():
        if value is not None:
            shown = str(int(value)) if isinstance(value, bool) else str(without_secrets(f"cluster.env.{name}", value))
            yield f"{name}={shlex.quote(shown)}", "cluster.env"
    yield handover.JOB, "the frozen configuration"
    yield "RANK, WORLD_SIZE, MASTER_ADDR ...", "set by torchrun for each rank"
