"""Rules of the machines: where they meet, how long they have, and what their processes are. Each yields the problems that it finds."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ddp_train.config.cluster import ENGINES, check_environment, max_restarts, rendezvous_of
from ddp_train.config.run_config import PartialConfig
from ddp_train.config.schema import ClusterConfig
from ddp_train.config.values import node_range
from ddp_train.errors import ConfigError, conflict
from ddp_train.system.slurm_step import slurm_step
from ddp_train.system.torchrun_env import is_torchrun_worker

_OURS = "ddp-train cluster=machines"
_BY_HAND = f"{_OURS} cluster.nodes=MACHINES cluster.rendezvous_endpoint=FIRST_MACHINE:29400"

# The number of copies | a second variable, where the number proves nothing | what they say | what was meant
_SIGNS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun has started {} of this command", f"srun --ntasks-per-node=1 {_OURS} ..."),
    ("OMPI_COMM_WORLD_SIZE", "", "mpirun has started {} of this command", f"mpirun --map-by ppr:1:node {_BY_HAND} ..."),
    ("PMI_SIZE", "", "mpiexec has started {} of this command", f"mpiexec -ppn 1 {_BY_HAND} ..."),
    ("PET_NNODES", "", "the run has {} machines", f"{_OURS} ..."),
    ("NNODES", "", "the run has {} machines", f"{_OURS} ..."),
    ("WORLD_SIZE", "RANK", "{} of this command run, one for each RANK", f"{_OURS} cluster.nodes=$WORLD_SIZE cluster.node_rank=$RANK ..."),
)


def check_machines(config: PartialConfig) -> Iterator[ConfigError]:
    """Check where the machines meet, on each of them, how long they have, and what their processes' environment is to be."""
    cluster = config.cluster
    yield from check_environment(cluster)
    yield from check_copies(cluster, os.environ)
    if cluster.walltime is not None and cluster.walltime <= cluster.grace_s:
        typed = config.tree["cluster"]["walltime"]
        happened = f"is {typed}, and cluster.grace_s is {cluster.grace_s:g} s: the run would stop before it begins"
        yield ConfigError(key="cluster.walltime", happened=happened, fix="a smaller cluster.grace_s")
    if cluster.agent == "torch" and cluster.launcher != "local":
        happened = f"is torch, and cluster.launcher={cluster.launcher} starts agents of ours on several machines"
        yield conflict("cluster.agent", happened, "own", expected="own; or torchrun itself, typed on each machine (docs/versions.md)")
    if cluster.launcher in ENGINES and not is_torchrun_worker():
        yield from _check_other_machines(cluster)
    if cluster.hosts is not None or cluster.launcher == "ssh":
        yield from _check_hosts(config)
    if cluster.launcher == "machines" and not is_torchrun_worker():
        rendezvous = rendezvous_of(cluster, os.environ)
        if rendezvous.is_elastic and max_restarts(cluster, os.environ) == 0:
            happened = f"is 0 with {rendezvous.min_nodes} to {rendezvous.max_nodes} machines: the first one that leaves would end the run"
            yield ConfigError(key="cluster.max_restarts", happened=happened, expected="at least 1", fix="cluster.max_restarts=10")


def _check_other_machines(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check that nothing of their shape is left open: the machines are others than this one, which cannot ask them."""
    if cluster.device == "auto":
        happened = "is auto, and the run uses machines other than this one"
        yield conflict("cluster.device", happened, "cuda", expected="cuda: a GPU for each process; or cpu")
    has_open = not cluster.hosts or any(host.processes is None for host in cluster.hosts)
    if cluster.device == "cuda" and cluster.processes_per_node is None and has_open:
        happened = "is not given, and this machine cannot know the GPUs of the others"
        yield conflict("cluster.processes_per_node", happened, 4, expected="the number of GPUs of each machine")


def _check_hosts(config: PartialConfig) -> Iterator[ConfigError]:
    cluster = config.cluster
    if cluster.launcher != "ssh":
        yield ConfigError(key="cluster.hosts", happened=f"is given with cluster.launcher={cluster.launcher}", expected="cluster=ssh")
    elif not cluster.hosts:
        expected = "the machines' names for ssh"
        yield ConfigError(key="cluster.hosts", happened="is not given", expected=expected, fix="'cluster.hosts=[a,b:4,c]'")
    else:
        if cluster.nodes is not None and cluster.nodes.most != len(cluster.hosts):
            happened = f"is {config.tree['cluster']['nodes']}, with {len(cluster.hosts)} in cluster.hosts"
            yield conflict("cluster.nodes", happened, "null", expected="null, or MIN:MAX with all machines as MAX")
        if not cluster.wait:
            yield ConfigError(key="cluster.wait", happened="is false with cluster=ssh", expected="true: the run ends with its command")


def check_copies(cluster: ClusterConfig, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Find that this command was started several times at once, by srun, mpirun or in each pod, and each copy would train alone.

    Or that each would start all processes of a machine that another copy starts as well.
    """
    if is_torchrun_worker(environment):
        return
    step, is_alone = slurm_step(environment), False
    with suppress(ConfigError):  # told where it is looked for
        is_alone = cluster.launcher == "local" or (cluster.launcher == "machines" and rendezvous_of(cluster, environment).is_alone)
    if is_alone:
        for variable, second, says, meant in _SIGNS:
            is_task = step is not None and not step.is_typed_in  # no batch script, and no shell in which one command is typed
            if (second and second not in environment) or (second == "SLURM_PROCID" and not is_task):
                continue
            with suppress(ValueError):
                if (count := node_range(environment.get(variable, "")).most) > 1:
                    happened = f"{variable}={environment[variable]} says that {says.format(count)}; each would start its own run"
                    expected = "one command for each machine of a run; on one machine it starts a process per GPU itself"
                    fix = f"{meant}\n  on purpose: env -u {variable} ddp-train ..."
                    yield ConfigError(key="cluster", happened=happened, expected=expected, fix=fix)
                    return
    if step is not None and step.most_tasks > 1 and not step.is_typed_in:
        happened = f"srun starts {step.most_tasks} tasks on a node, and each of them would start all processes of the node"
        fix = "srun --ntasks-per-node=1 ddp-train ..., with cluster.processes_per_node if needed"
        expected = "one task per node: ddp-train starts one process per GPU itself"
        yield ConfigError(key="cluster", happened=happened, expected=expected, fix=fix)
