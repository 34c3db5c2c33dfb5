"""A machine's examination of itself and of the network to the others. `problems` judges the reports."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ddp_train.config.cluster import Rendezvous, environment_of
from ddp_train.launch.job import Job
from ddp_train.launch.node_facts.facts import GLOO, NCCL, NodeFacts, collect, taken_by_nccl
from ddp_train.system import network, process_env
from ddp_train.system.deadline import wait_until

EXAMINE_WITHIN_S = 60.0
ANSWER_WITHIN_S = 30.0
_SUMS_WITHIN_S = {"cpu": 30.0, "cuda": 60.0}  # eight CUDA contexts at once take up to 15, NCCL over 64 ranks up to 30
_SUMS_OF_A_RANK_S = 0.5
_SPEEDS_WITHIN_S = 60.0
_BEGINS_WITHIN_S = 110.0  # from a job's begin until its ranks have met: Python, torch, a container
_CONNECT_S = 5.0  # a packet that is lost is sent again after one second and after three
_SHARED_WITHIN_S = 10.0  # a network file system may show late what another machine has written
_WRITTEN_BYTES = 1 << 16
_MAX_REACHED = 32  # each machine tries to connect to at most so many after it
_SHARED_MEMORY = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")

Address = Sequence[Any]  # host and port


def sums_within_s(device: str, ranks: int, *, is_full: bool) -> float:
    """Return the longest wait for the sums; only ranks without an answer take so long."""
    return _SUMS_WITHIN_S[device] + _SUMS_OF_A_RANK_S * ranks + _SPEEDS_WITHIN_S * is_full


def most_minutes(device: str, ranks: int, *, is_full: bool) -> int:
    """Return after how many minutes an examination ends at the latest."""
    return math.ceil((_BEGINS_WITHIN_S + EXAMINE_WITHIN_S + 3 * ANSWER_WITHIN_S + sums_within_s(device, ranks, is_full=is_full)) / 60)


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    facts: NodeFacts
    address: Address  # where the others connect
    write_error: str  # why it cannot write into the run's folder; "": it can
    free_bytes: int  # on the file system of that folder
    shared_memory_bytes: int | None  # /dev/shm as a whole; None: there is none
    open_files: int  # how many a process may have open
    locked_bytes: int | None  # how much memory a process may lock; None: no limit
    adapters: Mapping[str, str] = field(default_factory=dict)  # of InfiniBand (or RoCE) -> the state of its ports: "ACTIVE"
    network: str = ""  # NCCL_NET, as the ranks have it
    nccl: Sequence[str] = ()  # the interfaces that NCCL may take; empty: no GPU is used

    @property
    def active_adapters(self) -> int:
        """How many adapters for InfiniBand have a port that is up."""
        return sum("ACTIVE" in state for state in self.adapters.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"facts": self.facts.to_json()})

    @classmethod
    def from_json(cls, text: str) -> MachineReport:
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields | {"facts": NodeFacts.from_json(fields["facts"])})


@dataclass(frozen=True, kw_only=True)
class PeerReport:
    """A machine's report about its network to the others."""

    gloo: str  # the interface that gloo takes
    unresolved: Sequence[str] = ()  # host names that do not resolve here: the first machine's and its own
    unreached: Mapping[int, str] = field(default_factory=dict)  # machine -> why a connection to it failed
    unseen: Sequence[int] = ()  # machines whose file in the run's folder it does not see

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PeerReport:
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields | {"unreached": {int(number): why for number, why in fields["unreached"].items()}})


class Examination:
    """The examination of this machine, by its first rank."""

    def __init__(self, job: Job, *, number: int, count: int, first: str) -> None:
        self._job = job
        self._number = number  # which machine this is
        self._count = count  # how many there are
        self._first = first  # name or address of the first one; "": there is no other
        self._environment = {**os.environ, **environment_of(job.config.cluster.env)}  # of the ranks
        self._listener: socket.socket | None = None

    def examine(self) -> MachineReport:
        """Examine this machine, write its file into the run's folder, and listen for the others."""
        # The node program's facts: from its own command line, and its own `cluster.env`.
        if process_env.FACTS in os.environ:
            facts = NodeFacts.from_json(Path(os.environ[process_env.FACTS]).read_text("utf-8"))
        else:
            here = Rendezvous(min_nodes=self._count, max_nodes=self._count, node_rank=self._number)
            facts = collect(self._job.config, here, processes=process_env.local_world_size())
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        write_error = _refusal(partial(self._file_of(self._number).write_bytes, bytes(_WRITTEN_BYTES)))
        free = _file_system(self._job.run_folder.root)
        shared = _file_system(_SHARED_MEMORY)
        return MachineReport(
            facts=facts,
            address=self._listen(),
            write_error=write_error,
            free_bytes=free.f_bavail * free.f_frsize if free else 0,
            shared_memory_bytes=shared.f_blocks * shared.f_frsize if shared else None,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
            adapters=_adapters(),
            network=self._environment.get("NCCL_NET", ""),
            nccl=[] if facts.device == "cpu" else taken_by_nccl(self._environment.get(NCCL, ""), network.interfaces()),
        )

    def probe_peers(self, addresses: Mapping[int, Address]) -> PeerReport:
        others = [number % self._count for number in range(self._number + 1, self._number + self._count)]
        tried = [other for other in others if other in addresses][:_MAX_REACHED]

        def connect(other: int) -> str:
            return _refusal(lambda: socket.create_connection(tuple(addresses[other]), timeout=_CONNECT_S).close())

        with ThreadPoolExecutor(max_workers=max(1, len(tried))) as pool:
            refusals = dict(zip(tried, pool.map(connect, tried), strict=True))
        names = (self._first, socket.gethostname()) if others else ()
        wait_until(lambda: all(self._file_of(other).exists() for other in others), within_s=_SHARED_WITHIN_S, every_s=0.1)
        return PeerReport(
            gloo=self._gloo(addresses),
            unresolved=[name for name in names if _refusal(partial(socket.getaddrinfo, name.strip("[]"), None))],
            unreached={other: why for other, why in refusals.items() if why},
            unseen=[other for other in others if not self._file_of(other).exists()],
        )

    def close(self) -> None:
        """Stop listening, and remove this machine's file."""
        if self._listener is not None:
            self._listener.close()
        with suppress(OSError):
            self._file_of(self._number).unlink()

    def _file_of(self, number: int) -> Path:
        return self._job.run_folder.root / f"machine_{number}"

    def _listen(self) -> Address:
        """Listen, and return the address for the others, which connect and send nothing."""
        self._listener = network.listen("", 0)
        named = network.interfaces().get(self._environment.get(GLOO, "").partition(",")[0])
        host = (named or [""])[0] or (network.address_towards(self._first) if self._first else "")
        return [host or self._first, self._listener.getsockname()[1]]

    def _gloo(self, addresses: Mapping[int, Address]) -> str:
        """Return the interface that gloo takes: the configured one, or the one on the way to another machine."""
        if self._environment.get(GLOO):
            return self._environment[GLOO]
        for other, (host, _) in addresses.items():
            if other != self._number and (here := network.address_towards(host)):
                return network.interface_of(here) or here
        return "lo"


def _refusal(attempt: Callable[[], object]) -> str:
    """Try something, and return why the system refuses it, or ""."""
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _file_system(path: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:
        return None


def _adapters() -> dict[str, str]:
    adapters = {}
    with suppress(OSError):
        for adapter in sorted(_INFINIBAND.iterdir()):
            states = [file.read_text().split(":")[-1].strip() for file in sorted(adapter.glob("ports/*/state"))]
            adapters[adapter.name] = ", ".join(states)
    return adapters
