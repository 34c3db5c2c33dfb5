"""Several nodes by hand: the same `ddp-train cluster=torchrun ...` on every node starts that node's agent.

Nothing is composed for the run here: global rank 0, wherever the rendezvous puts it, composes, claims the folder and tells the others.
"""

from __future__ import annotations

from ddp_train import devices
from ddp_train.config import RunConfig
from ddp_train.errors import ConfigError
from ddp_train.launch.agent_process import rank_environment, run_agent

_PREEMPTED = 75


def join(config: RunConfig, arguments: list[str]) -> int:
    """Start this node's agent and return its exit code.

    Args:
        config: this node's view of the config, of which only `cluster` is used.
        arguments: the command line, which every rank gets and global rank 0 alone composes.

    Raises:
        ConfigError: the rendezvous is not given.
    """
    cluster = config.tree["cluster"]
    processes = devices.processes_per_node(cluster["processes_per_node"], cluster["device"])
    if cluster["nodes"] > 1 and not cluster["rendezvous_endpoint"]:
        raise ConfigError(
            key="cluster.rendezvous_endpoint",
            happened="is not given",
            expected="HOST:PORT of the first node, the same on every node",
            fix="cluster.rendezvous_endpoint=node0:29400",
        )
    agent = [f"--nnodes={cluster['nodes']}", f"--nproc-per-node={processes}"]
    if cluster["rendezvous_endpoint"]:
        agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint={cluster['rendezvous_endpoint']}", f"--rdzv-id={cluster['rendezvous_id']}"]
        if cluster["node_rank"] is not None:
            agent += [f"--rdzv-conf=is_host={int(cluster['node_rank'] == 0)}"]
    else:
        agent += ["--standalone"]
    code = run_agent(
        [*agent, "-m", "ddp_train", *arguments],
        environment=rank_environment(processes, cluster["threads_per_process"]),
    )
    return _PREEMPTED if code == 143 else code  # rank 0, wherever it is, says what was saved: running again continues either way
