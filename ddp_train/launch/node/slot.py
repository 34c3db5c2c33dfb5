"""What a machine knows before it joins a run: which one it is, where the first machine is (`NodeSlot`), and what it brings (`Work`).

The first machine serves the registry (`registry.py`). By hand that is at the endpoint that everybody has typed; under an engine at a port
that is free, which the first machine writes into a file of the run folder.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_train.config.cluster import hosts_of
from ddp_train.config.saved import answers_before
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import ConfigError
from ddp_train.launch.job import Job
from ddp_train.launch.node.facts import Facts
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import write_json
from ddp_train.system.network import WAITING, interfaces
from ddp_train.system.slurm_step import slurm_step

Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class NodeSlot:
    """One machine of a run."""

    index: int | None  # which machine it is, from 0; None: as they come
    least: int  # so many machines are needed to train
    most: int  # and so many may take part
    launch: str  # tells this start of the run from any other one; "": not said
    is_first: bool  # it serves the registry
    is_given: bool = False  # an engine has chosen the machines: for one that is refused no other will come
    names: tuple[str, ...] = ()  # what the machines are called, by index, where the engine knows
    listener: socket.socket | None = None  # of the first machine: where it serves
    addresses: tuple[Address, ...] = ()  # of the others: where the registry may be, tried in turn
    notice: Path | None = None  # or a file that says so, which the first machine writes

    @property
    def is_elastic(self) -> bool:
        """Whether machines may leave and come while the run goes on."""
        return self.least < self.most

    def registry_addresses(self) -> tuple[Address, ...]:
        """Return where the registry may be; () while the first machine has not said it."""
        if self.notice is None:
            return self.addresses
        with suppress(OSError, ValueError, KeyError):  # not yet
            refresh(self.notice.parent)
            found = json.loads(self.notice.read_text())
            return tuple((host, found["port"]) for host in found["hosts"])
        return ()

    def publish(self) -> None:
        """Write where the registry is, under the names that others may know, the likeliest first (the first machine)."""
        if self.notice is not None and self.listener is not None:
            addresses = [address for name, found in interfaces().items() if name != "lo" for address in found]
            hosts = [socket.gethostname(), *(addresses or ["127.0.0.1"])]
            write_json(self.notice, {"hosts": hosts, "port": self.listener.getsockname()[1]})


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one machine brings to a run: one job, or what a command line asks for."""

    cluster: ClusterConfig
    processes: int  # on this machine
    facts: Facts
    max_restarts: int  # the first machine's count
    token: str = ""  # a machine with another one is of another run
    job: Job | None = None  # the first machine's; it sends it to the others. None: rank 0 composes what `arguments` ask for
    arguments: Sequence[str] = field(default_factory=list)

    @property
    def run_folder(self) -> RunFolder | None:
        """Where the run is; None: it is unknown before rank 0 has composed, or it is no run that is recorded."""
        return None if self.job is None else self.job.record


def with_world_size(job: Job, world_size: int) -> Job:
    """Return the same job for another number of ranks, and write its config down (ConfigError: more ranks than samples in a batch)."""
    config = job.config.on(world_size)
    if config is not job.config:
        job.run_folder.record_config(config.yaml(answers_before(config, job.run_folder.root)))
    return replace(job, config=config)


def slot_under_an_engine(
    spec: Spec, environment: Mapping[str, str], *, index: int | None = None, launch: str | None = None, meeting: str | None = None
) -> NodeSlot:
    """Find which machine this is, where an engine has started `ddp-train node SPEC`.

    In a step of SLURM everything comes from SLURM's variables. Elsewhere the engine says it.

    Args:
        index: which machine this is; None: as SLURM, PET_NODE_RANK or NODE_RANK say.
        launch: the same word on all machines, and no other start of this run has it; None: SLURM's job, step and restart.
        meeting: HOST:PORT where the first machine serves the registry; None: it takes a free port and says which in the run folder.
    """
    step = slurm_step(environment)
    if index is None:
        given = environment.get("PET_NODE_RANK") or environment.get("NODE_RANK")
        index = step.index if step is not None else int(given) if given is not None and given.isdigit() else None
    launch = launch or (step.id if step is not None else None)
    if index is None or index >= spec.max_nodes:
        happened = "it is not said which machine this is" if index is None else f"this would be machine {index} of {spec.max_nodes}"
        fix = "ddp-train node SPEC --index=0 --launch=WORD"
        raise ConfigError(happened=happened, expected="a step of SLURM, NODE_RANK, or --index", fix=fix)
    if launch is None:
        expected = "a step of SLURM, or --launch=WORD, the same on each machine and new each time"
        raise ConfigError(happened="it is not said which start of the run this is", expected=expected)
    is_first = index == 0
    host, _, port = (meeting or "").rpartition(":")
    return NodeSlot(
        index=index,
        least=spec.min_nodes,
        most=spec.max_nodes,
        launch=launch,
        is_first=is_first,
        is_given=True,
        names=step.hosts if step is not None else tuple(hosts_of(spec.job.config.cluster)),
        listener=listen("", int(port or 0)) if is_first else None,
        addresses=((host.strip("[]"), int(port)),) if meeting else (),
        notice=None if meeting else spec.job.run_folder.meeting(launch),
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine ("": all of them), at a free port where `port` is 0."""
    is_ipv6 = ":" in host or (not host and socket.has_dualstack_ipv6())
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=WAITING, dualstack_ipv6=is_ipv6 and not host)


def refresh(folder: Path) -> None:
    """Let NFS ask its server what is in a folder (close-to-open): else what was missing there is so for a minute. OSError: no folder."""
    os.listdir(folder)
