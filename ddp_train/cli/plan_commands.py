"""The commands, files and variables with which a plan comes to life, as each launcher has them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_train.checkpoint.disk_space import in_units
from ddp_train.cli.plan_text import Screen, as_typed, command
from ddp_train.config.cluster import rendezvous_of
from ddp_train.config.spelling import without_secrets
from ddp_train.job import Job
from ddp_train.launch import local
from ddp_train.launch.agent_process import rank_environment
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import ENGINES, Rendered, engine_of
from ddp_train.launch.source_copy import measure_source
from ddp_train.launch.submit import freeze
from ddp_train.system import devices, handover

_WRITTEN = "config.yaml, .hydra, environment.json, metrics.jsonl, tensorboard, logs, checkpoints and result.json in each run folder"
_LINES_SHOWN = 4  # of machines that differ by their number alone


class Submitted(NamedTuple):
    """What an engine would be given."""

    rendered: Rendered
    code: str  # in words: what is copied, and where to
    spec: Path  # of the first job
    allocation: str | None  # the job of SLURM in which it would run at once


def submitted(jobs: Sequence[Job], *, sweep: Path | None = None, parallel: int = 1) -> Submitted | None:
    """Return what an engine would be given for jobs; None where none starts them.

    Args:
        sweep: the folder of the sweep whose jobs they are.
        parallel: so many at a time.

    Raises:
        ConfigError: the engine refuses it.
    """
    cluster, run_folder = jobs[0].config.cluster, jobs[0].run_folder
    if cluster.launcher not in ENGINES:
        return None
    into = run_folder.code if sweep is None else sweep / "launch/code_HASH"
    code, count, size = measure_source(into, limit_mib=cluster.code_limit_mib)
    specs = [freeze(job, code, parallel=parallel) for job in (jobs[:1] if cluster.wait else jobs)]  # who waits submits one by one
    return Submitted(
        rendered=engine_of(cluster.launcher).render(specs),
        code=f"{count:,} files of source, {in_units(size)}, are copied to {as_typed(into)}; later edits do not reach the run",
        spec=run_folder.spec,
        allocation=slurm_client.allocation() if cluster.launcher == "slurm" else None,
    )


def show(screen: Screen, jobs: Sequence[Job], given: Submitted | None) -> None:
    """Show how jobs are started: those of a sweep, or one."""
    cluster = jobs[0].config.cluster
    screen.heading("How it is started")
    screen.table(_environment(jobs[0]))
    screen.fact("writes", f"{_WRITTEN}: `ddp-train help docs/run_folder.md`")
    if given is not None:
        screen.fact("code", given.code)
        screen.fact("spec", f"{as_typed(given.spec)}: the frozen job, its shape, and the hash of the code")
        _show_files(screen, given.rendered.files)
        if given.allocation is None:
            screen.fact("runs", *map(command, given.rendered.commands))
        else:
            screen.fact(
                "step", f"not submitted: it runs at once in the allocation (job {given.allocation}), as a step of srun with task.sh"
            )
    elif cluster.launcher == "machines":
        screen.fact("type", *_on_each_machine(jobs[0]))
    elif len(jobs) == 1:
        screen.fact("agent", f"torchrun's, in a process that `ddp-train` forks, with {command(local.agent_arguments(jobs[0]))}")
        screen.fact("ranks", f"{command([sys.executable, '-u', '-m', 'ddp_train'])}, started by the agent")
    else:
        screen.fact("agent", "torchrun's, in a process that `ddp-train` forks; its ranks take one job after another")


def _show_files(screen: Screen, files: Mapping[Path, str]) -> None:
    """Show files as they would be written; of several that differ by the job or the machine, the first."""
    alike: dict[str, list[Path]] = {}
    for file in files:
        alike.setdefault(re.sub(r"\d+", "N", file.name), []).append(file)
    for name, (first, *others) in alike.items():
        screen.fact("file", as_typed(first))
        screen.block(files[first])
        if others:
            screen.fact("files", f"{len(others)} more {name}, one for each {'machine' if 'N' in name else 'job'}")


def _on_each_machine(job: Job) -> Iterator[str]:
    """Yield what is typed on each machine."""
    cluster = job.config.cluster
    found = rendezvous_of(cluster, os.environ)
    words = [text for text in job.command[1:] if not text.startswith("cluster.node_rank=")]

    def line(rank: str) -> str:
        return command(["ddp-train", *words, f"cluster.node_rank={rank}"])

    if cluster.node_rank is None and found.node_rank is not None:
        yield f"{command(['ddp-train', *words])}   on each machine; its number comes from the environment, and is {found.node_rank} here"
    elif found.max_nodes <= _LINES_SHOWN:
        yield from (line(str(rank)) for rank in range(found.max_nodes))
    else:
        yield f"{line('0')}   on the machine of {found.endpoint}"
        yield f"{line('N')}   on each other one, N from 1 to {found.max_nodes - 1}"


def _environment(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the variables that the ranks get, and why; secrets stay references."""
    cluster = job.config.cluster
    processes = devices.processes_per_node(cluster.processes_per_node, cluster.device)
    is_here = cluster.launcher not in ENGINES
    for name, value in rank_environment(processes, cluster.threads_per_process).items():
        if cluster.threads_per_process is not None:
            yield f"{name}={value}", "cluster.threads_per_process"
        else:
            yield f"{name}={value if is_here else '...'}", f"the cores of {'this' if is_here else 'the'} machine, shared out"
    for name, value in cluster.env.items():
        if value is not None:
            shown = str(int(value)) if isinstance(value, bool) else str(without_secrets(f"cluster.env.{name}", value))
            yield f"{name}={command([shown])}", "cluster.env"
    yield handover.JOB, "the frozen configuration"
    yield "RANK, WORLD_SIZE, MASTER_ADDR ...", "set by torchrun for each rank"
