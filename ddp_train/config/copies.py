"""What proves that a command was started several times at once: by srun, by mpirun, by an operator in each of its pods. Imports no torch.

On one machine alone each copy would train a run of its own, and nobody would hear of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddp_train.config.cluster import meeting
from ddp_train.config.schema import ClusterConfig, node_range
from ddp_train.errors import ConfigError
from ddp_train.system.slurm_step import slurm_step
from ddp_train.system.torchrun_env import is_torchrun_worker

_BY_HAND = "cluster.nodes=MACHINES cluster.rendezvous_endpoint=FIRST_MACHINE:29400"


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A variable whose number, above 1, is that of the copies."""

    variable: str
    says: str  # {} is the number
    meant: str  # to type instead
    beside: str = ""  # the variable that a copy has as well: a number alone may be anybody's


_SIGNS = (
    _Sign(
        variable="SLURM_STEP_NUM_TASKS",
        beside="SLURM_PROCID",
        says="srun has started {} of this command",
        meant="srun --ntasks-per-node=1 ddp-train cluster=torchrun ...",
    ),
    _Sign(
        variable="OMPI_COMM_WORLD_SIZE",
        says="mpirun has started {} of this command",
        meant=f"mpirun --map-by ppr:1:node ddp-train cluster=torchrun {_BY_HAND} ...",
    ),
    _Sign(
        variable="PMI_SIZE",
        says="mpiexec has started {} of this command",
        meant=f"mpiexec -ppn 1 ddp-train cluster=torchrun {_BY_HAND} ...",
    ),
    _Sign(variable="PET_NNODES", says="the run has {} machines", meant="ddp-train cluster=torchrun ..."),
    _Sign(variable="NNODES", says="the run has {} machines", meant="ddp-train cluster=torchrun ..."),
    _Sign(
        variable="WORLD_SIZE",
        beside="RANK",
        says="{} of this command are started, one for each RANK",
        meant="ddp-train cluster=torchrun cluster.nodes=$WORLD_SIZE cluster.node_rank=$RANK ... in each pod",
    ),
)


def check_copies(cluster: ClusterConfig, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Find that each copy of this command would train alone, or start all processes of a machine that another copy starts as well."""
    if is_torchrun_worker(environment):
        return
    sign = next((sign for sign in _SIGNS if _copies(sign, environment) > 1), None) if _is_alone(cluster, environment) else None
    step = slurm_step(environment)
    if sign is not None:
        says = sign.says.format(_copies(sign, environment))
        yield ConfigError(
            key="cluster",
            happened=f"{sign.variable}={environment[sign.variable]} says that {says}; each would train a run of its own",
            expected="one command for each machine of a run; on one machine it starts a process per GPU itself",
            fix=f"{sign.meant}\n  on purpose: env -u {sign.variable} ddp-train ...",
        )
    elif step is not None and step.most_tasks > 1 and not step.is_typed_in:
        yield ConfigError(
            key="cluster",
            happened=f"srun starts {step.most_tasks} tasks on a node, and each of them would start all processes of the node",
            expected="one task per node: ddp-train starts one process per GPU itself",
            fix="srun --ntasks-per-node=1 ddp-train ..., with cluster.processes_per_node where it has to be said",
        )


def _is_alone(cluster: ClusterConfig, environment: Mapping[str, str]) -> bool:
    """Tell whether the run is this machine's alone."""
    with suppress(ConfigError):  # told where it is looked for
        return cluster.launcher == "local" or (cluster.launcher == "torchrun" and meeting(cluster, environment).is_alone)
    return False


def _copies(sign: _Sign, environment: Mapping[str, str]) -> int:
    """Return how many copies there are for certain."""
    if sign.beside and sign.beside not in environment:
        return 1
    if sign.beside == "SLURM_PROCID" and ((step := slurm_step(environment)) is None or step.is_typed_in):
        return 1  # a batch script, or a shell in which one command is typed
    try:
        return node_range(environment.get(sign.variable, ""))[1]
    except ValueError:
        return 1
