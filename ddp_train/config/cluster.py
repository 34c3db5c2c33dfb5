"""The section `cluster`: how many machines, where they meet, and what their processes find in their environment. Imports no torch.

What the config leaves null is read from the variables that torchrun itself reads (PET_*), that Kubernetes operators set, or that scripts
for SLURM export. docs/multinode.md has the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ddp_train.config.schema import ClusterConfig, node_range, seconds_of
from ddp_train.errors import ConfigError
from ddp_train.redaction import reveal
from ddp_train.system import torchrun_env

_Value = TypeVar("_Value")

_PORT = 29500  # torchrun's own default; only where several machines are given MASTER_ADDR and no port
_C10D_PORT = 29400  # torch's own default, for operators that give the host alone
_ID = "ddp_train"
LOOPBACK = "loopback"
"""The rendezvous of one machine (`launch/agent/rendezvous.py`)."""
ON_ADDRESS = "c10d_on_address"
"""torch's c10d rendezvous, served on one address."""
ALONE = ("--nnodes=1", f"--rdzv-backend={LOOPBACK}", "--rdzv-endpoint=127.0.0.1")
"""What an agent of ours that is alone is told."""
_VARIABLES = {
    "nodes": ("PET_NNODES", "NNODES"),
    "node_rank": ("PET_NODE_RANK", "NODE_RANK"),
    "rendezvous_endpoint": ("PET_RDZV_ENDPOINT",),
    "rendezvous_id": ("PET_RDZV_ID",),
    "rendezvous_backend": ("PET_RDZV_BACKEND",),
    "max_restarts": ("PET_MAX_RESTARTS",),
    "processes_per_node": ("PET_NPROC_PER_NODE",),
}
_ADDRESS = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT"))


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the machines of a run find each other."""

    min_nodes: int
    max_nodes: int
    node_rank: int | None
    backend: str  # "c10d", "static", or "" on one machine alone
    endpoint: str  # HOST:PORT, "" on one machine alone
    id: str

    @property
    def is_elastic(self) -> bool:
        """Whether machines may leave and come while the run goes on."""
        return self.min_nodes < self.max_nodes


def meeting(cluster: ClusterConfig, environment: Mapping[str, str]) -> Meeting:
    """Read where the machines meet from the config, or else from the environment.

    Raises:
        ConfigError: something is missing, malformed, or contradicts something else.
    """
    nodes, nodes_from = _setting("nodes", cluster, environment)
    min_nodes, max_nodes = _read(node_range, nodes or 1, nodes_from)
    if max_nodes == 1:
        return Meeting(min_nodes=1, max_nodes=1, node_rank=None, backend="", endpoint="", id=_ID)
    rank, rank_from = _setting("node_rank", cluster, environment)
    node_rank = None if rank is None else _read(_number, rank, rank_from)
    backend, backend_from = _setting("rendezvous_backend", cluster, environment)
    endpoint, endpoint_from = _setting("rendezvous_endpoint", cluster, environment)
    if endpoint is None:  # an address is what goes with a static rendezvous, as torchrun has it
        endpoint, endpoint_from = _address(environment)
        backend = backend or ("static" if endpoint and node_rank is not None and min_nodes == max_nodes else None)
    backend = backend or "c10d"
    if backend not in ("c10d", "static"):
        raise ConfigError(key=backend_from, happened=f"is {backend!r}", expected="c10d or static")
    if endpoint is None:
        raise ConfigError(
            key="cluster.rendezvous_endpoint",
            happened="is not given, and neither PET_RDZV_ENDPOINT nor MASTER_ADDR is in the environment",
            expected="HOST:PORT of the first node, the same on every node",
            fix="cluster.rendezvous_endpoint=node0:29400",
        )
    if backend == "c10d" and ":" not in str(endpoint):
        endpoint = f"{endpoint}:{_C10D_PORT}"
    host, _, port = str(endpoint).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(key=endpoint_from, happened=f"is {endpoint!r}", expected="HOST:PORT, a port from 1 to 65535")
    if backend == "static" and min_nodes < max_nodes:
        raise ConfigError(
            key="cluster.nodes",
            happened=f"is {nodes} with a static rendezvous",
            expected="one number: a static rendezvous waits for all machines",
            fix=f"cluster.rendezvous_backend=c10d, or cluster.nodes={max_nodes}",
        )
    if backend == "static" and node_rank is None:
        raise ConfigError(
            key="cluster.node_rank",
            happened="is not given, and neither PET_NODE_RANK nor NODE_RANK is in the environment",
            expected=f"0 to {max_nodes - 1}, another on each machine: a static rendezvous cannot tell them apart",
            fix="cluster.node_rank=0 on the machine of the endpoint",
        )
    if node_rank is not None and node_rank >= max_nodes:
        raise ConfigError(key=rank_from, happened=f"is {node_rank}, of {max_nodes} machines", expected=f"0 to {max_nodes - 1}")
    name, _ = _setting("rendezvous_id", cluster, environment)
    return Meeting(
        min_nodes=min_nodes, max_nodes=max_nodes, node_rank=node_rank, backend=backend, endpoint=str(endpoint), id=str(name or _ID)
    )


def most_nodes(cluster: ClusterConfig) -> int:
    """Return how many machines take part at most; 1 where the environment has no good number, which `meeting` will say."""
    nodes, _ = _setting("nodes", cluster, os.environ if cluster.launcher == "torchrun" else {})
    try:
        return node_range(nodes or 1)[1]
    except ValueError:
        return 1


def max_restarts(cluster: ClusterConfig, environment: Mapping[str, str]) -> int:
    """Return how often the run may start again; 0 where nobody says."""
    restarts, source = _setting("max_restarts", cluster, environment)
    return _read(_number, restarts or 0, source)


def stops_at(cluster: ClusterConfig, environment: Mapping[str, str], *, started: float, now: float) -> float | None:
    """Return when a run has to stop so that it can save before its time is up, in seconds since the epoch; None: no limit is known.

    Args:
        started: when the command was started.
        now: a SLURM_JOB_END_TIME before it is of another job.
    """
    end = environment.get("SLURM_JOB_END_TIME", "")  # seconds since the epoch, in the environment of sbatch and srun
    limits = [float(end)] if end.isdigit() and float(end) > now else []
    if cluster.walltime is not None:
        limits.append(started + seconds_of(cluster.walltime))
    return min(limits) - cluster.grace_s if limits else None


def processes_given(cluster: ClusterConfig, environment: Mapping[str, str]) -> int | None:
    """Return the number of processes on this machine that the config or the environment gives; None for `auto` and the like."""
    processes, _ = _setting("processes_per_node", cluster, environment)
    return int(processes) if str(processes).isdigit() else None


def environment_of(env: Mapping[str, Any], *, deterministic: bool = False, given: Container[str] = ()) -> dict[str, str]:
    """Return `cluster.env` as text: what the ranks' processes find in their environment, whatever it was before.

    A number is written as it is, true and false as 1 and 0; null leaves the variable as the user's environment has it.

    Args:
        deterministic: add what cuBLAS and NCCL need to give the same bits each time. cuBLAS reads it once in a process, when CUDA starts,
            NCCL when the process group opens. Its NVLS adds in an order that differs from call to call.
        given: the variables that the environment has; one that chooses NCCL's algorithms is left alone.
    """
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"} if deterministic else {}
    return {name: value for name, value in ours.items() if name != "NCCL_ALGO" or name not in given} | {
        str(name): str(int(value)) if isinstance(value, bool) else str(reveal(value)) for name, value in env.items() if value is not None
    }


def check_environment(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Find what cannot be an environment variable, and what torchrun would set again."""
    for name, value in cluster.env.items():
        key = f"cluster.env.{name}"
        if not str(name).replace("_", "").isalnum():
            yield ConfigError(key=key, happened="is no name of an environment variable", expected="letters, digits and _")
        elif name in torchrun_env.VARIABLES:
            yield ConfigError(key=key, happened="is set by torchrun, for each rank", expected="no such key")
        elif isinstance(value, (dict, list)):
            yield ConfigError(key=key, happened=f"is {value!r}", expected="text, a number, true or false; null to leave it alone")


def _setting(name: str, cluster: ClusterConfig, environment: Mapping[str, str]) -> tuple[Any, str]:
    """Return a value and where it stands: in the config, in the environment, or nowhere (None)."""
    value = getattr(cluster, name)
    if value is not None:
        return reveal(value), f"cluster.{name}"
    variable = next((variable for variable in _VARIABLES[name] if environment.get(variable)), None)
    return (environment[variable], variable) if variable else (None, f"cluster.{name}")


def _address(environment: Mapping[str, str]) -> tuple[str | None, str]:
    for address, port in _ADDRESS:
        if environment.get(address):
            return f"{environment[address]}:{environment.get(port) or _PORT}", f"{address}:{port}"
    return None, ""


def _read(parse: Callable[[Any], _Value], value: Any, source: str) -> _Value:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(key=source, happened=f"is {value!r}", expected=str(error)) from None


def _number(value: Any) -> int:
    if not str(value).isdigit():
        raise ValueError("a number from 0")
    return int(value)
