"""The environment variables that torchrun's agent sets for each rank: the only reader of them.

`config/cluster.py` reads those for the agent itself (PET_*, and MASTER_ADDR where a cluster sets it).
"""

import os
import re
from collections.abc import Mapping
from functools import partial

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torchrun overwrites these for each rank."""


def is_torchrun_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a torchrun agent started the process with this environment (by default this one).

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
    """Return the file in which torch's agent looks for this rank's error; "": there is none."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def joining_hangs(agent: str, environment: Mapping[str, str]) -> bool:
    """Tell whether torch 2.13 waits for ever when a machine joins the run of the torchrun with this command line."""
    nodes = re.search(r"--nnodes[= ](\d+):(\d+)", agent) or re.fullmatch(r"(\d+):(\d+)", environment.get("PET_NNODES", ""))
    return nodes is not None and nodes[1] != nodes[2] and environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"


def store_address() -> tuple[str, int]:
    """Return the host and the port of the store in which the ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def agent_serves_store() -> bool:
    """Tell whether the agent serves that store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
