"""A machine before it joins a run: where it finds the others (`NodeRendezvous`), and its part in the run (`ThisNode`).

The first machine serves the registry (`registry.py`). By hand that is at the endpoint that everybody has typed; under an engine at a port
that is free, which the first machine writes into a file of the run folder.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_train.config.cluster import Rendezvous
from ddp_train.config.saved import config_text
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import ConfigError
from ddp_train.launch.job import Job
from ddp_train.launch.node_facts.facts import NodeFacts
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import refresh, write_json
from ddp_train.system.network import interfaces, listen
from ddp_train.system.process_env import slurm_step


@dataclass(frozen=True, kw_only=True)
class NodeRendezvous(Rendezvous):
    """How one machine finds the others of its run."""

    listener: socket.socket | None = None  # of the first machine: where it serves the registry
    meeting_file: Path | None = None  # the file in which it says where that is; None: host and ports say it
    run: str = ""  # which one the machine comes for (`NodeFacts.run`)
    is_fixed: bool = False  # an engine has chosen the machines: for one that is refused no other will come

    @property
    def is_first(self) -> bool:
        """Whether this machine serves the registry."""
        return self.listener is not None

    def registry_addresses(self) -> tuple[tuple[str, int], ...]:
        """Return the possible addresses of the registry, to try in turn; () before the first machine has published one."""
        if self.meeting_file is None:
            return tuple((self.host, port) for port in self.ports)
        with suppress(OSError, ValueError, KeyError):  # not yet
            refresh(self.meeting_file.parent)
            meeting = json.loads(self.meeting_file.read_text())
            return tuple((host, meeting["port"]) for host in meeting["hosts"])
        return ()

    def publish(self) -> None:
        """Write where the registry is, under the names that others may know, the likeliest first (the first machine)."""
        if self.meeting_file is not None and self.listener is not None:
            addresses = [address for name, own in interfaces().items() if name != "lo" for address in own]
            hosts = [socket.gethostname(), *(addresses or ["127.0.0.1"])]
            write_json(self.meeting_file, {"hosts": hosts, "port": self.listener.getsockname()[1]})


@dataclass(frozen=True, kw_only=True)
class ThisNode:
    """One machine's part in a run: one job, or what a command line asks for."""

    rendezvous: NodeRendezvous
    cluster: ClusterConfig
    facts: NodeFacts
    max_restarts: int  # the first machine's count
    job: Job | None = None  # the first machine's; it sends it to the others. None: rank 0 composes what `arguments` ask for
    arguments: Sequence[str] = field(default_factory=list)

    @property
    def run_folder(self) -> RunFolder | None:
        """Where the run is; None: it is unknown before rank 0 has composed, or the job keeps nothing (`Job.is_resumable`)."""
        return self.job.run_folder if self.job is not None and self.job.is_resumable else None


def with_world_size(job: Job, world_size: int) -> Job:
    """Return the same job for another number of ranks, and write its config down (ConfigError: more ranks than samples in a batch)."""
    config = job.config.on(world_size)
    if config is not job.config:
        job.run_folder.record_config(config_text(config, job.run_folder.root))
    return replace(job, config=config)


def rendezvous_under_an_engine(
    spec: Spec, environment: Mapping[str, str], *, node_rank: int | None = None, launch_id: str | None = None, meeting: str | None = None
) -> NodeRendezvous:
    """Find which machine this is, where an engine has started `ddp-train node SPEC`.

    In a step of SLURM everything comes from SLURM's variables. Elsewhere the engine says it.

    Args:
        node_rank: which machine this is; None: as SLURM, PET_NODE_RANK or NODE_RANK say.
        launch_id: the same word on all machines, and no other launch of this run has it; None: SLURM's job, step and restart.
        meeting: HOST:PORT where the first machine serves the registry; None: it takes a free port and says which in the run folder.
    """
    step = slurm_step(environment)
    if node_rank is None:
        text = environment.get("PET_NODE_RANK") or environment.get("NODE_RANK") or ""
        node_rank = step.node_rank if step is not None else int(text) if text.isdigit() else None
    launch_id = launch_id or (step.id if step is not None else None)
    if node_rank is None or node_rank >= spec.max_nodes:
        happened = "this machine's number is unknown" if node_rank is None else f"this would be machine {node_rank} of {spec.max_nodes}"
        fix = "ddp-train node SPEC --index=0 --launch=WORD"
        raise ConfigError(happened=happened, expected="a step of SLURM, NODE_RANK, or --index", fix=fix)
    if launch_id is None:
        expected = "a step of SLURM, or --launch=WORD, the same on each machine and new each time"
        raise ConfigError(happened="the launch of the run is unknown", expected=expected)
    host, _, port = (meeting or "").rpartition(":")
    return NodeRendezvous(
        node_rank=node_rank,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        launch_id=launch_id,
        host=host.strip("[]"),
        ports=(int(port),) if meeting else (),
        token=spec.token,
        hosts=step.hosts if step is not None else tuple(host.name for host in spec.job.config.cluster.hosts or ()),
        is_fixed=True,
        listener=listen("", int(port or 0)) if node_rank == 0 else None,
        meeting_file=None if meeting else spec.job.run_folder.meeting(launch_id),
    )
