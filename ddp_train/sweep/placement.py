"""Where the jobs of a sweep run: in this command, in the torchrun that started it, or on an engine; and what cannot be there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import SweepConfig
from ddp_train.errors import ConfigError
from ddp_train.launch.engine.engine import ENGINES, QUEUES
from ddp_train.launch.launcher import MakeSlots
from ddp_train.launch.submit import slots as engine_slots
from ddp_train.system import devices
from ddp_train.system.torchrun_env import is_torchrun_worker


def engine_of(config: RunConfig) -> str | None:
    """Return the engine that runs a job; None where this command, or the torchrun that started it, does."""
    launcher = config.cluster.launcher
    return launcher if launcher in ENGINES and not is_torchrun_worker() else None


def slots_of(config: RunConfig) -> MakeSlots | None:
    """Return what makes the slots of the engine that runs a job; None where the launcher has slots of its own."""
    return None if engine_of(config) is None else engine_slots


def is_left_to_a_queue(config: RunConfig, *, plans_all: bool) -> bool:
    """Tell whether all jobs are submitted at once, and nobody waits for them."""
    return engine_of(config) in QUEUES and plans_all and not config.cluster.wait


def problems(configs: Sequence[RunConfig], settings: SweepConfig, *, plans_all: bool) -> list[ConfigError]:
    """Find what cannot be where the jobs run: two engines, more jobs at a time than there are GPUs for, or what an engine cannot do."""
    engines = list(dict.fromkeys(map(engine_of, configs)))
    if len(engines) > 1:
        return [
            ConfigError(
                key="cluster.launcher",
                happened=f"is {' and '.join(config.cluster.launcher for config in configs[:2])} in one sweep",
                expected="one for all jobs",
            )
        ]
    if engines and engines[0] is not None:
        return list(_engine_problems(configs[0], settings, plans_all=plans_all))
    clusters = [each.cluster for each in configs if settings.parallel_jobs > 1]
    sizes = [
        devices.processes_per_node(cluster.processes_per_node, "cuda")
        for cluster in clusters
        if devices.resolve_device(cluster.device) == "cuda"
    ]
    wanted = settings.parallel_jobs * max(sizes, default=0)
    if wanted <= len(devices.gpus()):
        return []
    return [
        ConfigError(
            key="sweep.parallel_jobs",
            happened=f"{wanted} processes at a time want a GPU each; this machine shows {len(devices.gpus())}",
            fix="fewer jobs at a time, or a smaller cluster.processes_per_node",
        )
    ]


def _engine_problems(config: RunConfig, settings: SweepConfig, *, plans_all: bool) -> Iterator[ConfigError]:
    """Find what a sweep cannot have where an engine runs its jobs."""
    launcher = config.cluster.launcher
    if launcher == "slurm" and (job := os.environ.get("SLURM_JOB_ID")):
        yield ConfigError(
            key="cluster.launcher",
            happened=f"is slurm, and this is job {job}: a sweep submits jobs of its own",
            expected="the login node; or a sweep within this job's machines",
            fix="-m without cluster=slurm; or srun ddp-train -m cluster=machines",
        )
    if launcher not in QUEUES and settings.parallel_jobs > 1:
        yield ConfigError(
            key="sweep.parallel_jobs",
            happened=f"is {settings.parallel_jobs}, and with cluster.launcher={launcher} each job takes all hosts",
            expected="1: the jobs run one after another",
            fix="sweep.parallel_jobs=1",
        )
    if is_left_to_a_queue(config, plans_all=plans_all) and settings.on_failure != "continue":
        yield ConfigError(
            key="sweep.on_failure",
            happened=f"is {settings.on_failure}, and nobody waits for the jobs to see one fail",
            expected="continue (a job that fails is started again by its own verdict); or a command that waits",
            fix="cluster.wait=true",
        )
