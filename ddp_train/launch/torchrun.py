"""Several nodes by hand: the same `ddp-train cluster=torchrun ...` on every node starts that node's agent.

Nothing is composed for the run here: global rank 0, wherever the rendezvous puts it, composes, claims the folder and tells the others.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress

from ddp_train.config.cluster import ALONE, ON_ADDRESS, Meeting, environment_of, max_restarts, meeting, processes_given
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import ENVIRONMENT_REFUSES, PREEMPTED, TERMINATED, UserError
from ddp_train.launch.agent_process import rank_environment, run_agent
from ddp_train.system import devices
from ddp_train.system.network import is_address

_LAST_CALL_S = 2  # how long an elastic run that has machines enough waits for one more; a late one makes it start again, not fail
_ALIVE_EVERY_S, _MISSED_SIGNS = 1, 4  # how soon an elastic run knows that a machine is gone; clocks may differ by less than their product


def join(cluster: ClusterConfig, arguments: list[str]) -> int:
    """Start this node's agent and return its exit code.

    Args:
        cluster: the section `cluster` of the config, as this node sees it.
        arguments: the command line, which every rank gets and global rank 0 alone composes.

    Raises:
        ConfigError: neither the config nor the environment says where the machines meet.
    """
    found = meeting(cluster, os.environ)
    processes = devices.processes_per_node(processes_given(cluster, os.environ), cluster.device)
    agent = [f"--grace-s={cluster.grace_s}", f"--nproc-per-node={processes}", f"--max-restarts={max_restarts(cluster, os.environ)}"]
    agent += rendezvous_options(found, join_timeout_s=cluster.join_timeout_s, conf=os.environ.get("PET_RDZV_CONF", ""))
    environment = rank_environment(processes, cluster.threads_per_process)
    if found.backend == "c10d":
        # torch's agents share one store for all attempts, whose address a newcomer never learns and a new rank 0 does not serve: both wait
        # for ever (docs/decisions/0008-restart.md). With this each attempt has a store of its own.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if found.endpoint:
        nodes = f"{found.min_nodes} to {found.max_nodes}" if found.is_elastic else str(found.max_nodes)
        print(f"waiting for {nodes} machines at {found.endpoint}, {cluster.join_timeout_s} s at most", file=sys.stderr)
        if problem := _reach(found, within_s=cluster.join_timeout_s):
            print(f"\n{problem}", file=sys.stderr)
            return ENVIRONMENT_REFUSES
    code = run_agent([*agent, "-m", "ddp_train", *arguments], environment=environment | environment_of(cluster.env))
    return PREEMPTED if code == TERMINATED else code  # rank 0, wherever it is, says what was saved: running again continues either way


def rendezvous_options(found: Meeting, *, join_timeout_s: int, conf: str = "") -> list[str]:
    """Return what torchrun has to be told so that the agents find each other.

    Args:
        conf: the user's own `--rdzv-conf` (PET_RDZV_CONF), which wins over our time-outs.
    """
    if not found.endpoint:
        return [*ALONE]
    backend = ON_ADDRESS if found.backend == "c10d" and is_address(found.endpoint.rpartition(":")[0]) else found.backend
    options = [f"--nnodes={found.min_nodes}:{found.max_nodes}", f"--rdzv-backend={backend}", f"--rdzv-id={found.id}"]
    options.append(f"--rdzv-endpoint={found.endpoint}")
    settings = [f"join_timeout={join_timeout_s}", f"read_timeout={join_timeout_s}", f"last_call_timeout={_LAST_CALL_S}"]
    if found.is_elastic:
        settings += [f"keep_alive_interval={_ALIVE_EVERY_S}", f"keep_alive_max_attempt={_MISSED_SIGNS}"]
    if found.backend == "static":
        options.append(f"--node-rank={found.node_rank}")
        settings = [f"timeout={join_timeout_s}"]
    elif found.node_rank is not None:
        settings.append(f"is_host={int(found.node_rank == 0)}")
    return [*options, f"--rdzv-conf={','.join([*settings, conf] if conf else settings)}"]


def _reach(found: Meeting, *, within_s: float) -> UserError | None:
    """Wait until somebody serves the endpoint, unless this machine does; return why nobody could be reached.

    torch waits as well, and then prints pages of C++ frames without the reason.
    """
    host, _, port = found.endpoint.rpartition(":")
    address, deadline = (host.strip("[]"), int(port)), time.monotonic() + within_s
    if found.node_rank == 0 or (found.node_rank is None and _is_here(address)):
        return None
    while True:
        try:
            with socket.create_connection(address, timeout=max(1.0, min(5.0, deadline - time.monotonic()))):
                return None
        except OSError as error:
            if time.monotonic() > deadline:
                return UserError(
                    key="cluster.rendezvous_endpoint",
                    happened=f"{found.endpoint} could not be reached in {within_s} s: {error.strerror or error}",
                    expected="the agent of machine 0, at a port that is open between the machines",
                    fix="start the run there too; or the host of machine 0 and another port; or a longer cluster.join_timeout_s",
                )
        time.sleep(0.5)


def _is_here(address: tuple[str, int]) -> bool:
    """Tell whether an address is this machine's: only then something can be bound to it."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((place[0], 0))
            return True
    return False
