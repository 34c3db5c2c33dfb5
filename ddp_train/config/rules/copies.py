"""What proves that a command was started several times at once, by srun, mpirun or in each pod: each copy would train a run of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from ddp_train.config.cluster import meeting
from ddp_train.config.schema import ClusterConfig
from ddp_train.config.values import node_range
from ddp_train.errors import ConfigError
from ddp_train.system.slurm_step import slurm_step
from ddp_train.system.torchrun_env import is_torchrun_worker

_OURS = "ddp-train cluster=machines"
_BY_HAND = f"{_OURS} cluster.nodes=MACHINES cluster.rendezvous_endpoint=FIRST_MACHINE:29400"

# The number of copies | what a copy has beside it, where a number alone proves nothing | what they say | what was meant
_SIGNS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun has started {} of this command", f"srun --ntasks-per-node=1 {_OURS} ..."),
    ("OMPI_COMM_WORLD_SIZE", "", "mpirun has started {} of this command", f"mpirun --map-by ppr:1:node {_BY_HAND} ..."),
    ("PMI_SIZE", "", "mpiexec has started {} of this command", f"mpiexec -ppn 1 {_BY_HAND} ..."),
    ("PET_NNODES", "", "the run has {} machines", f"{_OURS} ..."),
    ("NNODES", "", "the run has {} machines", f"{_OURS} ..."),
    ("WORLD_SIZE", "RANK", "{} of this command run, one for each RANK", f"{_OURS} cluster.nodes=$WORLD_SIZE cluster.node_rank=$RANK ..."),
)


def check_copies(cluster: ClusterConfig, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Find that each copy of this command would train alone, or start all processes of a machine that another copy starts as well."""
    if is_torchrun_worker(environment):
        return
    step, is_alone = slurm_step(environment), False
    with suppress(ConfigError):  # told where it is looked for
        is_alone = cluster.launcher == "local" or (cluster.launcher == "machines" and meeting(cluster, environment).is_alone)
    for variable, beside, says, meant in _SIGNS if is_alone else ():
        is_task = step is not None and not step.is_typed_in  # no batch script, and no shell in which one command is typed
        if (beside and beside not in environment) or (beside == "SLURM_PROCID" and not is_task):
            continue
        with suppress(ValueError):
            if (count := node_range(environment.get(variable, ""))[1]) > 1:
                yield ConfigError(
                    key="cluster",
                    happened=f"{variable}={environment[variable]} says that {says.format(count)}; each would train a run of its own",
                    expected="one command for each machine of a run; on one machine it starts a process per GPU itself",
                    fix=f"{meant}\n  on purpose: env -u {variable} ddp-train ...",
                )
                return
    if step is not None and step.most_tasks > 1 and not step.is_typed_in:
        yield ConfigError(
            key="cluster",
            happened=f"srun starts {step.most_tasks} tasks on a node, and each of them would start all processes of the node",
            expected="one task per node: ddp-train starts one process per GPU itself",
            fix="srun --ntasks-per-node=1 ddp-train ..., with cluster.processes_per_node where it has to be said",
        )
