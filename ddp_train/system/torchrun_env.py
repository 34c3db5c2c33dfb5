"""What torchrun's agent tells each of its ranks in the environment: the only reader of these variables.

What an agent itself is told (PET_*, and MASTER_ADDR where a cluster sets it) is read in `config/cluster.py`.
"""

from __future__ import annotations

import os

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each rank, whatever stands there before."""


def is_torchrun_worker() -> bool:
    """Tell whether a torchrun agent started this process.

    RANK alone does not say so: a Kubernetes operator sets it for the whole pod.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def rank() -> int:
    """Return this process's place among all ranks."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """Return how many ranks there are."""
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """Return this process's place among the ranks of its node."""
    return int(os.environ["LOCAL_RANK"])


def local_world_size() -> int:
    """Return how many ranks this node has."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def node_rank() -> int:
    """Return this node's place among all nodes; an agent is a node, and one machine may run several."""
    return _count("GROUP_RANK")


def num_nodes() -> int:
    """Return how many nodes there are."""
    return int(os.environ["GROUP_WORLD_SIZE"])


def store_host() -> str:
    """Return the host of the store in which the ranks meet."""
    return os.environ["MASTER_ADDR"]


def store_port() -> int:
    """Return the port of that store."""
    return int(os.environ["MASTER_PORT"])


def agent_serves_store() -> bool:
    """Tell whether the agent serves that store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_last_attempt() -> bool:
    """Tell whether this node's agent has no restart left, so that a failure now is the run's."""
    return restart_count() >= max_restarts()


def restart_count() -> int:
    """Return how often this node's agent has started its ranks again."""
    return _count("TORCHELASTIC_RESTART_COUNT")


def max_restarts() -> int:
    """Return how often it does so at most."""
    return _count("TORCHELASTIC_MAX_RESTARTS")


def _count(variable: str) -> int:
    return int(os.environ.get(variable, "0"))
