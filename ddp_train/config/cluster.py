"""The section `cluster`: the number of machines, their rendezvous, and the environment of their processes. Imports no torch.

Values that are null in the config are read from the variables that torchrun itself reads (PET_*), that Kubernetes operators set, or that
scripts for SLURM export; inside a SLURM step, from the step. docs/multinode.md has the table.
"""

import os
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ddp_train.config.schema import ClusterConfig
from ddp_train.config.values import NodeRange, node_range
from ddp_train.errors import ConfigError
from ddp_train.system import devices, process_env
from ddp_train.system.process import NUM_THREADS
from ddp_train.system.process_env import slurm_step
from ddp_train.system.redaction import reveal

_Value = TypeVar("_Value")

ENGINES = ("slurm", "ssh")  # what `cluster.launcher` may be where an engine starts the node programs, on machines that it gives
_PORT = 29500  # torchrun's own default; only if several machines are given MASTER_ADDR and no port
_ENDPOINTS_PORT = 29400  # torch's own default, for operators that give the host alone
_STEPS_PORTS = range(10_000, 30_000)  # of SLURM's steps: below the kernel's ephemeral ports
_TRIED_PORTS = 8  # one after another, if others have taken the first
LOOPBACK = "loopback"  # the rendezvous backend of one machine (`launch/agent/elastic.py`)
REGISTRY = "registry"  # the backend of several machines, for one attempt: their registry has told each agent its rank
ALONE = ("--nnodes=1", f"--rdzv-backend={LOOPBACK}", "--rdzv-endpoint=127.0.0.1")  # arguments for an agent that is alone
_VARIABLES = {
    "nodes": ("PET_NNODES", "NNODES"),
    "node_rank": ("PET_NODE_RANK", "NODE_RANK"),
    "rendezvous_endpoint": ("PET_RDZV_ENDPOINT",),
    "rendezvous_id": ("PET_RDZV_ID",),
    "max_restarts": ("PET_MAX_RESTARTS",),
    "processes_per_node": ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"),
}
_ADDRESS = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT"))


def engine_name_of(cluster: ClusterConfig) -> str | None:
    """Return the engine that runs a job; None: this command, or the torchrun that started it, runs it."""
    return cluster.launcher if cluster.launcher in ENGINES and not process_env.is_torchrun_worker() else None


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How the machines of a run find each other."""

    min_nodes: int  # so many are needed to train
    max_nodes: int  # and so many may take part
    node_rank: int | None = None  # of this machine, from 0; None: in the order of their coming
    host: str = ""  # of the first machine; "": of one that is alone, or that has not said yet where it is
    ports: tuple[int, ...] = ()  # the first one that is free there is used
    token: str = ""  # all machines of this run have it, and no other run; "": none
    launch_id: str = ""  # unique to this launch of the run, inside a SLURM step or under an engine
    hosts: tuple[str, ...] = ()  # the machines by rank, inside a SLURM step or under an engine

    @property
    def is_alone(self) -> bool:
        return self.max_nodes == 1

    @property
    def is_elastic(self) -> bool:
        """Whether machines may leave and come while the run goes on."""
        return self.min_nodes < self.max_nodes

    @property
    def nodes(self) -> str:
        """How many machines take part, as `cluster.nodes` has it: "2", "1:4"."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else f"{self.max_nodes}"

    @property
    def endpoint(self) -> str:
        """Where the others find the first machine, as people write it."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.ports[0]}"


def rendezvous_of(cluster: ClusterConfig, environment: Mapping[str, str]) -> Rendezvous:
    """Read the rendezvous from the config, or else from the environment, or else from the SLURM step."""
    min_nodes, max_nodes = _nodes(cluster, environment)
    token, _ = _setting("rendezvous_id", cluster, environment)
    if max_nodes == 1:
        return Rendezvous(min_nodes=1, max_nodes=1, token=str(token or ""))
    step = slurm_step(environment)
    rank, rank_from = _setting("node_rank", cluster, environment)
    node_rank = None if rank is None else _read(_number, rank, rank_from)
    endpoint, endpoint_from = _setting("rendezvous_endpoint", cluster, environment)
    if endpoint is None:
        for host, port in _ADDRESS[::-1]:
            if environment.get(host):
                endpoint, endpoint_from = f"{environment[host]}:{environment.get(port) or _PORT}", f"{host}:{port}"
    if endpoint is None and step is not None and len(step.hosts) > 1:
        first = zlib.crc32(step.id.encode()) % (len(_STEPS_PORTS) - _TRIED_PORTS)
        host, ports = step.hosts[0], tuple(_STEPS_PORTS[first : first + _TRIED_PORTS])
        node_rank = step.node_rank if node_rank is None else node_rank
    elif endpoint is None:
        happened = "is not given, and neither PET_RDZV_ENDPOINT nor MASTER_ADDR is in the environment"
        expected, fix = "HOST:PORT of the first machine, the same on every machine", "cluster.rendezvous_endpoint=node0:29400"
        raise ConfigError(key="cluster.rendezvous_endpoint", happened=happened, expected=expected, fix=fix)
    else:
        host, _, port = (str(endpoint) if ":" in str(endpoint) else f"{endpoint}:{_ENDPOINTS_PORT}").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(key=endpoint_from, happened=f"is {endpoint!r}", expected="HOST:PORT, a port from 1 to 65535")
        host, ports = host.strip("[]"), (int(port),)
    if node_rank is not None and node_rank >= max_nodes:
        raise ConfigError(key=rank_from, happened=f"is {node_rank}, of {max_nodes} machines", expected=f"0 to {max_nodes - 1}")
    return Rendezvous(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        host=host,
        ports=ports,
        token=str(token or ""),
        launch_id="" if step is None else step.id,
        hosts=() if step is None else step.hosts,
    )


def processes_of_nodes(cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the number of processes on each machine, in order; by default one per GPU of this machine, or two."""
    configured = processes_given(cluster, os.environ) if cluster.launcher == "machines" else cluster.processes_per_node
    own = [host.processes for host in cluster.hosts] if cluster.hosts else [None] * most_nodes(cluster)
    return tuple(devices.processes_per_node(count or configured, cluster.device) for count in own)


def most_nodes(cluster: ClusterConfig) -> int:
    """Return the maximal number of machines; 1 if the environment has a bad number, which `rendezvous_of` reports."""
    if cluster.hosts:
        return len(cluster.hosts)
    try:
        return _nodes(cluster, os.environ if cluster.launcher == "machines" else {}).most
    except ConfigError:
        return 1


def max_restarts(cluster: ClusterConfig, environment: Mapping[str, str]) -> int:
    """Return how often the run may start again; 0 by default."""
    restarts, source = _setting("max_restarts", cluster, environment)
    return _read(_number, restarts or 0, source)


def processes_given(cluster: ClusterConfig, environment: Mapping[str, str]) -> int | None:
    """Return the number of processes on this machine from the config or the environment; None: `auto` and the like."""
    processes, _ = _setting("processes_per_node", cluster, environment)
    return int(processes) if str(processes).isdigit() else None


def rank_environment(processes: int, threads_per_process: int | None) -> dict[str, str]:
    """Return the variables that every rank needs before torch starts: threads that share the cores instead of fighting for them."""
    threads = threads_per_process or max(1, len(os.sched_getaffinity(0)) // processes)
    return {NUM_THREADS: str(threads)} if threads_per_process or NUM_THREADS not in os.environ else {}


def environment_of(env: Mapping[str, Any], *, deterministic: bool = False, inherited: Container[str] = ()) -> dict[str, str]:
    """Return `cluster.env` as text: variables for the ranks, which override their environment.

    True and false become 1 and 0; null keeps the variable from the user's environment.

    Args:
        deterministic: add what cuBLAS and NCCL need for the same bits each time; they read it once in a process. NVLS and NVLSTree add in
            an order that differs from call to call.
        inherited: variables of the user's environment; one that chooses NCCL's algorithms is left alone.
    """
    for_determinism = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"} if deterministic else {}
    return {name: value for name, value in for_determinism.items() if name != "NCCL_ALGO" or name not in inherited} | {
        str(name): str(int(value)) if isinstance(value, bool) else str(reveal(value)) for name, value in env.items() if value is not None
    }


def check_environment(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Find names that cannot be environment variables, and variables that torchrun sets."""
    for name, value in cluster.env.items():
        key = f"cluster.env.{name}"
        if not str(name).replace("_", "").isalnum():
            yield ConfigError(key=key, happened="is not a valid name of an environment variable", expected="letters, digits and _")
        elif name in process_env.OF_TORCHRUN:
            yield ConfigError(key=key, happened="is set by torchrun, for each rank", expected="no such key")
        elif isinstance(value, (dict, list)):
            yield ConfigError(key=key, happened=f"is {value!r}", expected="text, a number, true or false; null to leave it unchanged")


def _nodes(cluster: ClusterConfig, environment: Mapping[str, str]) -> NodeRange:
    """Return how many machines take part. ConfigError: the environment has a bad number."""
    nodes, source = _setting("nodes", cluster, environment)
    return nodes if isinstance(nodes, NodeRange) else _read(node_range, nodes or 1, source)


def _setting(name: str, cluster: ClusterConfig, environment: Mapping[str, str]) -> tuple[Any, str]:
    """Return a value and its source: the config, the environment, or none (None)."""
    if (value := getattr(cluster, name)) is not None:
        return reveal(value), f"cluster.{name}"
    if variable := next((variable for variable in _VARIABLES[name] if environment.get(variable)), ""):
        return environment[variable], variable
    step = slurm_step(environment) if name == "nodes" else None
    return (len(step.hosts), "SLURM_STEP_NODELIST") if step is not None else (None, f"cluster.{name}")


def _read(parse: Callable[[Any], _Value], value: Any, source: str) -> _Value:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(key=source, happened=f"is {value!r}", expected=str(error)) from None


def _number(value: Any) -> int:
    if not str(value).isdigit():
        raise ValueError("a number from 0")
    return int(value)
