"""Several machines by hand: the same `ddp-train cluster=machines ...` on each of them.

Every machine composes and checks, and finds which one it is (`meet_machines`). The first one claims the folder, and its job is what all
run (`lead`); the others claim nothing and write nothing (`follow`). What runs then on each machine is in `node/`.
"""

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ddp_train.config.cluster import Rendezvous, max_restarts, processes_given, rendezvous_of
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import PREEMPTED, TERMINATED, EnvironmentRefuses
from ddp_train.launch.fork_requests import early_fork_server
from ddp_train.launch.job import Job
from ddp_train.launch.node.program import run_node
from ddp_train.launch.node.this_node import NodeRendezvous, ThisNode
from ddp_train.launch.node_facts.facts import collect, of_a_command_line
from ddp_train.system import devices
from ddp_train.system.network import is_address, listen
from ddp_train.system.process_env import is_torchrun_worker


def meet_machines(cluster: ClusterConfig, *, run: str = "") -> NodeRendezvous | None:
    """Find which of the machines this one is, and listen where it is the first. None: it is alone, or something else starts the ranks.

    `run`: which run this machine comes for (`NodeFacts.run`). ConfigError: nothing says where machines meet. EnvironmentRefuses: this is
    the first machine, and the port is taken.
    """
    if cluster.launcher != "machines" or is_torchrun_worker() or (rendezvous := rendezvous_of(cluster, os.environ)).is_alone:
        return None
    early_fork_server.begin(uses_compiler=True)  # before anybody waits for this machine: in a new attempt seconds count
    is_first = rendezvous.node_rank == 0 or (rendezvous.node_rank is None and _is_here(rendezvous.host))
    return NodeRendezvous(**vars(rendezvous), listener=_listen(rendezvous) if is_first else None, run=run)


def lead(rendezvous: NodeRendezvous, job: Job) -> int:
    """Run a job on this machine, the first, and on those that come, to its end; return its exit code."""
    this_node = _this_node(rendezvous, job.config)
    return _run(replace(this_node, job=job, max_restarts=this_node.max_restarts if job.is_resumable else 0))


def follow(rendezvous: NodeRendezvous, config: RunConfig) -> int:
    """Take part in a run that another machine leads, to its end; return its exit code."""
    return _run(_this_node(rendezvous, config))


def take_part_in_sweep(cluster: ClusterConfig, arguments: Sequence[str]) -> int | None:
    """Meet the other machines of a sweep, and take part to its end; return the exit code of this command. None: this machine is alone.

    Global rank 0, on the first machine, composes the `arguments` and claims the folder.
    """
    rendezvous = meet_machines(cluster)
    return None if rendezvous is None else _run(_this_node(rendezvous, cluster, arguments))


def _this_node(rendezvous: NodeRendezvous, config: RunConfig | ClusterConfig, arguments: Sequence[str] = ()) -> ThisNode:
    cluster = config if isinstance(config, ClusterConfig) else config.cluster
    facts = collect(config, rendezvous, processes=devices.processes_per_node(processes_given(cluster, os.environ), cluster.device))
    if isinstance(config, ClusterConfig):
        facts = of_a_command_line(facts, arguments)
    facts = replace(facts, run=rendezvous.run)
    restarts = max_restarts(cluster, os.environ)
    return ThisNode(rendezvous=rendezvous, cluster=cluster, facts=facts, max_restarts=restarts, arguments=arguments)


def _run(this_node: ThisNode) -> int:
    code = run_node(this_node)
    return PREEMPTED if code == TERMINATED else code  # running again continues either way


def _listen(rendezvous: Rendezvous) -> socket.socket | None:
    """Listen for the others; None: another of us does so on this machine, which this one follows. EnvironmentRefuses: the port is taken."""
    problem = ""
    for port in rendezvous.ports:
        try:  # on one interface where it is named by its address; what its name means differs between machines
            return listen(rendezvous.host if is_address(rendezvous.host) and _is_here(rendezvous.host) else "", port)
        except OSError as error:
            problem = f"cannot listen at {rendezvous.host}:{port}: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                break
    else:
        if rendezvous.node_rank is None:
            return None
    expected = "a port that is free on the first machine and open between the machines"
    fix = f"cluster.rendezvous_endpoint={rendezvous.host}:PORT with another port, the same on each machine"
    raise EnvironmentRefuses(key="cluster.rendezvous_endpoint", happened=problem, expected=expected, fix=fix)


def _is_here(host: str) -> bool:
    """Tell whether a host is this machine: only then something can be bound to its address."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
            return True
    return False
