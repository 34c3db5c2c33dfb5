"""What torchrun's agent tells each of its ranks in the environment: the only reader of these variables.

What an agent itself is told (PET_*, and MASTER_ADDR where a cluster sets it) is read in `config/cluster.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each rank, whatever stands there before."""


def is_torchrun_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a torchrun agent started the process with this environment: this one.

    RANK alone does not say so: a Kubernetes operator sets it for the whole pod.
    """
    return "TORCHELASTIC_RUN_ID" in environment and "LOCAL_RANK" in environment


def _number(variable: str, default: str | None = None) -> int:
    return int(os.environ[variable] if default is None else os.environ.get(variable, default))


rank = partial(_number, "RANK")  # this process's place among all ranks
world_size = partial(_number, "WORLD_SIZE")  # how many ranks there are
local_rank = partial(_number, "LOCAL_RANK")  # this process's place among the ranks of its node
local_world_size = partial(_number, "LOCAL_WORLD_SIZE")  # how many ranks this node has
node_rank = partial(_number, "GROUP_RANK", "0")  # this node's place among all nodes; an agent is a node, and one machine may run several
num_nodes = partial(_number, "GROUP_WORLD_SIZE")  # how many nodes there are
restart_count = partial(_number, "TORCHELASTIC_RESTART_COUNT", "0")  # how often this node's agent has started its ranks again
max_restarts = partial(_number, "TORCHELASTIC_MAX_RESTARTS", "0")  # how often it does so at most


def is_last_attempt() -> bool:
    """Tell whether this node's agent has no restart left, so that a failure now is the run's."""
    return restart_count() >= max_restarts()


def error_file() -> str:
    """Return the file in which an agent of torch's looks for the reason of this rank's end; "": it asks for none."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def joining_hangs(agent: str, environment: Mapping[str, str]) -> bool:
    """Tell whether torch 2.13 waits for ever when a machine joins the run of this torchrun, whose command line is given."""
    nodes = re.search(r"--nnodes[= ](\d+):(\d+)", agent) or re.fullmatch(r"(\d+):(\d+)", environment.get("PET_NNODES", ""))
    return nodes is not None and nodes[1] != nodes[2] and environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"


def store_address() -> tuple[str, int]:
    """Return the host and the port of the store in which the ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def agent_serves_store() -> bool:
    """Tell whether the agent serves that store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
