"""Rules of the machines: where they meet, how long they have, and what their processes are. Each yields the problems that it finds."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddp_train.config.cluster import check_environment, max_restarts, meeting
from ddp_train.config.rules.copies import check_copies
from ddp_train.config.schema import ClusterConfig
from ddp_train.config.values import host_and_processes, node_range, seconds_of
from ddp_train.errors import ConfigError
from ddp_train.system.torchrun_env import is_torchrun_worker


def check_machines(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check where the machines meet, on each of them, how long they have, and what their processes' environment is to be."""
    yield from check_environment(cluster)
    yield from check_copies(cluster, os.environ)
    if cluster.walltime is not None and seconds_of(cluster.walltime) <= cluster.grace_s:
        yield ConfigError(
            key="cluster.walltime",
            happened=f"is {cluster.walltime}, and cluster.grace_s is {cluster.grace_s:g} s: the run would stop before it begins",
            expected="a walltime that is longer than the time to save",
            fix="a smaller cluster.grace_s",
        )
    if cluster.agent == "torch" and cluster.launcher != "local":
        yield ConfigError(
            key="cluster.agent",
            happened=f"is torch, and cluster.launcher={cluster.launcher} starts agents of ours on several machines",
            expected="own; or torchrun itself, typed on each machine (docs/versions.md)",
            fix="cluster.agent=own",
        )
    if cluster.launcher in ("slurm", "ssh") and not is_torchrun_worker():
        yield from _check_other_machines(cluster)
    if cluster.hosts is not None or cluster.launcher == "ssh":
        yield from _check_hosts(cluster)
    if cluster.launcher == "machines" and not is_torchrun_worker():
        try:
            found, restarts = meeting(cluster, os.environ), max_restarts(cluster, os.environ)
        except ConfigError as error:
            yield error
            return
        if found.min_nodes < found.max_nodes and restarts == 0:
            yield ConfigError(
                key="cluster.max_restarts",
                happened=f"is 0 with {found.min_nodes} to {found.max_nodes} machines: the first one that leaves would end the run",
                expected="at least 1",
                fix="cluster.max_restarts=10",
            )


def _check_other_machines(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check that nothing of their shape is left open: the machines are others than this one, which cannot ask them."""
    if cluster.device == "auto":
        yield ConfigError(
            key="cluster.device",
            happened="is auto, and the run's machines are not this one",
            expected="cuda: a GPU for each process; or cpu",
            fix="cluster.device=cuda",
        )
    has_open = not cluster.hosts or None in [host_and_processes(host)[1] for host in cluster.hosts]
    if cluster.device == "cuda" and cluster.processes_per_node is None and has_open:
        yield ConfigError(
            key="cluster.processes_per_node",
            happened="is not given, and this machine cannot know the GPUs of the others",
            expected="how many GPUs each machine of the job has for it: one process each",
            fix="cluster.processes_per_node=4",
        )


def _check_hosts(cluster: ClusterConfig) -> Iterator[ConfigError]:
    """Check the machines of a run over SSH."""
    if cluster.launcher != "ssh":
        yield ConfigError(key="cluster.hosts", happened=f"is given with cluster.launcher={cluster.launcher}", expected="cluster=ssh")
    elif not cluster.hosts:
        yield ConfigError(
            key="cluster.hosts", happened="is not given", expected="the machines, as ssh knows them", fix="'cluster.hosts=[a,b:4,c]'"
        )
    else:
        if cluster.nodes is not None and node_range(cluster.nodes)[1] != len(cluster.hosts):
            yield ConfigError(
                key="cluster.nodes",
                happened=f"is {cluster.nodes}, with {len(cluster.hosts)} in cluster.hosts",
                expected="null, or the fewest that the run goes on with and all of them",
                fix="cluster.nodes=null",
            )
        if not cluster.wait:
            yield ConfigError(
                key="cluster.wait", happened="is false with cluster=ssh", expected="true: the run ends with the command that started it"
            )
