"""Several machines by hand: the same `ddp-train cluster=machines ...` on each of them.

Every machine composes and checks. The first one claims the folder, and its job is what all run (`node/`); the others claim nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ddp_train.config.cluster import Rendezvous, max_restarts, processes_given, rendezvous_of
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import NO_PROGRESS, PREEMPTED, TERMINATED, EnvironmentRefuses
from ddp_train.launch import local
from ddp_train.launch.agent_process import start_fork_server
from ddp_train.launch.job import Job
from ddp_train.launch.node.facts import collect, of_a_command_line
from ddp_train.launch.node.program import run_node
from ddp_train.launch.node.this_node import NodeRendezvous, ThisNode, listen
from ddp_train.system import devices
from ddp_train.system.network import is_address

_taken: list[tuple[NodeRendezvous, str]] = []  # by this process, which is the first machine's, and for which run, until that begins


def follow(config: RunConfig, *, run: str) -> int | None:
    """Take part in a run that another machine leads, and return its exit code; None: this machine is the first, or the only one.

    `run`: which run it comes for (`Facts.run`).
    """
    rendezvous = _rendezvous(config.cluster)
    if rendezvous is None:
        return None
    if rendezvous.is_first:
        _taken.append((rendezvous, run))
        return None
    return _ended(run_node(_this_node(config, rendezvous, run=run)))


def run(job: Job) -> int:
    """Run a job on this machine and those that come, to its end (the first machine, after `follow`); return its exit code."""
    if not _taken:
        return local.run(job)
    rendezvous, came_for = _taken.pop()
    if local.gets_nowhere(job):
        return NO_PROGRESS
    this_node = replace(_this_node(job.config, rendezvous, run=came_for), job=job)
    return _ended(run_node(this_node if job.is_run else replace(this_node, max_restarts=0)))


def run_sweep(cluster: ClusterConfig, arguments: list[str]) -> int | None:
    """Run what a command line asks for on all machines: global rank 0, on the first, composes it. None: this machine is the only one."""
    rendezvous = _rendezvous(cluster)
    return None if rendezvous is None else _ended(run_node(_this_node(cluster, rendezvous, arguments)))


def _ended(code: int) -> int:
    return PREEMPTED if code == TERMINATED else code  # running again continues either way


def _rendezvous(cluster: ClusterConfig) -> NodeRendezvous | None:
    """Find out which machine this is, and listen where it is the first. None: there is no other one.

    ConfigError: nothing says where the machines meet. EnvironmentRefuses: this is the first machine, and the port is taken.
    """
    found = rendezvous_of(cluster, os.environ)
    if found.is_alone:
        return None
    start_fork_server(uses_compiler=True)  # before anybody waits for this machine: in a new attempt seconds count
    listener = _listen(found) if found.node_rank == 0 or (found.node_rank is None and _is_here(found.host)) else None
    return NodeRendezvous(**vars(found), listener=listener)


def _listen(found: Rendezvous) -> socket.socket | None:
    """Listen for the others; None: another of us does so on this machine, which this one follows. EnvironmentRefuses: the port is taken."""
    problem = ""
    for port in found.ports:
        try:  # on one interface where it is named by its address; what its name means differs between machines
            return listen(found.host if is_address(found.host) and _is_here(found.host) else "", port)
        except OSError as error:
            problem = f"{found.host}:{port} cannot be listened at: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                break
    else:
        if found.node_rank is None:
            return None
    expected = "a port of the first machine that is free there and open between the machines"
    fix = f"cluster.rendezvous_endpoint={found.host}:PORT with another port, on each machine"
    raise EnvironmentRefuses(key="cluster.rendezvous_endpoint", happened=problem, expected=expected, fix=fix)


def _is_here(host: str) -> bool:
    """Tell whether a host is this machine: only then something can be bound to its address."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
            return True
    return False


def _this_node(config: RunConfig | ClusterConfig, rendezvous: NodeRendezvous, arguments: Sequence[str] = (), *, run: str = "") -> ThisNode:
    cluster = config if isinstance(config, ClusterConfig) else config.cluster
    facts = collect(config, rendezvous, processes=devices.processes_per_node(processes_given(cluster, os.environ), cluster.device))
    if isinstance(config, ClusterConfig):
        facts = of_a_command_line(facts, arguments)
    return ThisNode(
        rendezvous=rendezvous,
        cluster=cluster,
        facts=replace(facts, run=run),
        max_restarts=max_restarts(cluster, os.environ),
        arguments=arguments,
    )
