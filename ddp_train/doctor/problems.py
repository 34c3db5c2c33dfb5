"""What is wrong with the machines of a run: each problem with its host, what it is, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Any

from ddp_train.doctor.machine import MachineReport, PeerReport
from ddp_train.errors import printable
from ddp_train.launch.node.differences import SKEW_S, differences, fingerprint
from ddp_train.launch.node.facts import GLOO, NCCL

_GIB, _MIB = 1 << 30, 1 << 20
_MIN_FREE_BYTES = _GIB
_MIN_SHARED_BYTES = 512 * _MIB  # docker's default is 64 MiB
_MIN_OPEN_FILES = 1024
_MIN_LOCKED_BYTES = _GIB
_SLOW = {"cpu": 0.5, "cuda": 0.8}  # of the others' median; cores are shared with whatever else runs, GPUs are not
_SLOW_LINK = {"cpu": 0.2, "cuda": 0.5}
_MAX_COMPARED = 16  # groups of machines that are alike, each with each, to find the one that most agree with

_ADVICE = {  # by the beginning of a sentence
    "code: ": "the same code on each machine: stand in a folder that all share, or check out the same commit",
    "data.": "the same files on each machine: a folder that all share, or copy them again",
    "version of ": "install the same versions on each machine",
    "GLOO_": "the name of an interface that each machine has, or cluster.env.GLOO_SOCKET_IFNAME=null: then it is the one on the way there",
    "NCCL_": "the name of an interface that each machine has, or cluster.env.NCCL_SOCKET_IFNAME=null: then NCCL chooses",
    "and ": "as for those before",
    "": "the same command on each machine; only cluster.node_rank is another one",
}
_Rule = tuple[Callable[[MachineReport], Any], str, str]  # a value that all machines should have in common, what is wrong, what to do
_SAME: tuple[_Rule, ...] = (
    (
        lambda machine: machine.facts.uid,
        "runs as user {own}, the others as {usual}: they cannot read each other's files",
        "the same user, with the same number, on each machine",
    ),
    (
        lambda machine: machine.facts.device,
        "has {own}, the others have {usual}: all wait for the slowest at each step",
        "machines of one kind; cluster.device says what is used",
    ),
    (
        lambda machine: machine.facts.driver or "none",
        "has the NVIDIA driver {own}, the others have {usual}",
        "the same driver on each machine",
    ),
    (
        lambda machine: machine.active_adapters,
        "has {own} active adapters for InfiniBand, the others have {usual}",
        "ibstat there says which port is down",
    ),
)
_GPUS: _Rule = (
    lambda machine: machine.facts.device_count if machine.facts.device != "cpu" else 0,
    "has {own} GPUs, the others have {usual}",
    "nvidia-smi there says which are missing; cluster.processes_per_node=N where it is meant so",
)

_Found = tuple[int | str, str, str]  # which machine, or the names of several; what is wrong; what to do


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a rank says of its sums with the others."""

    rank: int
    machine: int
    device: str = ""
    wrong: str = ""  # what came out otherwise than it must
    matmul_tflops: float | None = None
    all_reduce_gb_s: float | None = None
    link_mb_s: float | None = None  # from the machine before this one; of the first rank of a machine


@dataclass(frozen=True, kw_only=True)
class Examined:
    """All that the machines have said, as it is judged."""

    count: int  # of machines
    processes: int  # of ranks
    folder: str
    machines: Mapping[int, MachineReport]
    ways: Mapping[int, PeerReport]
    utc: float  # the first machine's clock when it told the others that all are there
    measured: Mapping[int, Measurement] | None  # by rank; None: it was not tried
    downloads: bool = False  # the data set fetches what is missing
    expects_equal: bool = True  # no number of processes was given: each machine should have as many GPUs as the others

    def name(self, number: int | str) -> str:
        """Return what to call a machine, or several that have a name already."""
        if isinstance(number, str):
            return number
        if number not in self.machines:
            return f"machine {number}"
        host = self.machines[number].facts.host
        is_alone = sum(other.facts.host == host for other in self.machines.values()) == 1
        return host if is_alone else f"{host} (machine {number})"

    @cached_property
    def usual(self) -> int:
        """A machine that as many others as possible agree with: who differs from it is the odd one out."""
        alike: dict[str, list[int]] = {}
        for number, machine in sorted(self.machines.items()):
            alike.setdefault(fingerprint(machine.facts), []).append(number)
        groups = sorted(alike.values(), key=len, reverse=True)[:_MAX_COMPARED]
        apart = Counter({group[0]: 0 for group in groups})
        for one, other in combinations(groups, 2):
            ours, theirs = self.machines[one[0]].facts, self.machines[other[0]].facts
            if differences(ours, theirs) or differences(theirs, ours):  # what is missing on the first counts for neither
                apart.update({one[0]: len(other), other[0]: len(one)})
        return min(sorted(apart), key=lambda number: apart[number])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something to mend."""

    host: str
    what: str
    advice: str

    def __str__(self) -> str:
        return printable(f"{self.host}: {self.what}\n  fix: {self.advice}")


def problems(examined: Examined) -> list[Problem]:
    """Return everything that is wrong; [] for machines that are fit."""
    silent = [number for number in range(examined.count) if number not in examined.machines]
    found: list[_Found] = [(number, "has said nothing", "its terminal or its log says why") for number in silent]
    for part in (_told, _data, _devices, _folder, _limits, _clock, _network, _odd, _sums, _speed) if examined.machines else ():
        found += part(examined)
    return [Problem(host=examined.name(where), what=what, advice=advice) for where, what, advice in found]


def blocks_all_reduce(examined: Examined) -> bool:
    """Tell whether something is wrong that a process group would only wait for."""
    facts = [machine.facts for machine in examined.machines.values()]
    is_whole = len(facts) == len(examined.ways) == examined.count
    lacks = any(problem.startswith((GLOO, NCCL)) for each in facts for problem in each.problems)
    is_mixed = len({each.device == "cpu" for each in facts}) > 1  # some would open gloo alone
    is_short = any(each.device != "cpu" and each.device_count < each.processes for each in facts)
    return not is_whole or lacks or is_mixed or is_short or any(way.unreached for way in examined.ways.values())


def _told(examined: Examined) -> Iterator[_Found]:
    """What the machines have told, against the usual one."""
    usual = examined.machines[examined.usual].facts
    for number, machine in sorted(examined.machines.items()):
        for sentence in [*machine.facts.problems, *differences(usual, machine.facts)]:
            yield number, sentence, next(advice for beginning, advice in _ADVICE.items() if sentence.startswith(beginning))


def _data(examined: Examined) -> Iterator[_Found]:
    """Data that is nowhere; what is missing on one machine is a difference."""
    for key in () if examined.downloads else examined.machines[examined.usual].facts.data:
        if all(machine.facts.data.get(key) is None for machine in examined.machines.values()):
            hosts = ", ".join(examined.name(number) for number in sorted(examined.machines))
            yield hosts, f"{key}: there is nothing at this path", f"put the data there, or {key}=PATH"


def _devices(examined: Examined) -> Iterator[_Found]:
    for number, machine in sorted(examined.machines.items()):
        facts = machine.facts
        if facts.device != "cpu" and facts.device_count < facts.processes:
            what = f"{facts.processes} processes want a GPU each; it shows {facts.device_count}"
            yield number, what, "nvidia-smi there says which are missing, and dmesg why; or fewer cluster.processes_per_node"


def _odd(examined: Examined) -> Iterator[_Found]:
    """Each machine that has another value than most; of two the first is right."""
    for value, what, advice in (*_SAME, *((_GPUS,) if examined.expects_equal else ())):
        values = {number: value(machine) for number, machine in sorted(examined.machines.items())}
        usual = most_common(list(values.values()))
        yield from ((number, what.format(own=own, usual=usual), advice) for number, own in values.items() if own != usual)


def _folder(examined: Examined) -> Iterator[_Found]:
    """The run's folder: every machine writes there, and sees what the others write."""
    folder = examined.folder
    for number, machine in sorted(examined.machines.items()):
        if machine.writes:
            advice = "hydra.run.dir=FOLDER on a file system that every machine can write to"
            yield number, f"cannot write into {folder}: {machine.writes}", advice
        elif machine.free_bytes < _MIN_FREE_BYTES:
            advice = "remove old runs, checkpoint.keep_last=1, or hydra.run.dir=FOLDER elsewhere"
            yield number, f"{machine.free_bytes / _MIB:.0f} MiB are free where {folder} lies", advice
    writers = {number for number, machine in examined.machines.items() if not machine.writes}
    unseen = {number: set(way.unseen) & writers for number, way in examined.ways.items()}
    if not any(unseen.values()):
        return
    # Who shares the folder with most of the others is right; a machine that does not share it with that one is named.
    apart = Counter(dict.fromkeys(examined.ways, 0))
    for number, others in unseen.items():
        apart.update({number: len(others), **dict.fromkeys(others - {number}, 1)})
    right = min(sorted(apart), key=lambda number: apart[number])
    what = f"does not share {folder} with {examined.name(right)}: what one writes there the other does not see"
    for number in sorted(set(examined.ways) - {right}):
        if right in unseen[number] or number in unseen[right]:
            yield number, what, "hydra.run.dir=FOLDER on a file system that every machine has mounted (NFS, Lustre), and mounted there"


def _limits(examined: Examined) -> Iterator[_Found]:
    """What the operating system lets a process have."""
    for number, machine in sorted(examined.machines.items()):
        if (size := machine.shared_memory_bytes) is None or size < _MIN_SHARED_BYTES:
            what = "there is no /dev/shm" if size is None else f"/dev/shm has {size / _MIB:.0f} MiB; NCCL and data loaders need more"
            yield number, what, "docker run --shm-size=8g (or --ipc=host); mount -o remount,size=8G /dev/shm"
        if machine.open_files < _MIN_OPEN_FILES:
            what = f"a process may have {machine.open_files} open files; connections and data need {_MIN_OPEN_FILES}"
            yield number, what, "ulimit -n 65536; for good in /etc/security/limits.conf, under SLURM in slurmd's service (LimitNOFILE)"
        if machine.adapters and machine.locked_bytes is not None and machine.locked_bytes < _MIN_LOCKED_BYTES:
            what = f"a process may lock {machine.locked_bytes / _MIB:.0f} MiB of memory; InfiniBand locks what it sends"
            yield number, what, "ulimit -l unlimited; docker run --ulimit memlock=-1; under SLURM in slurmd's service (LimitMEMLOCK)"


def _clock(examined: Examined) -> Iterator[_Found]:
    ahead = {number: way.utc - examined.utc for number, way in examined.ways.items()}
    usual = median(ahead.values()) if len(ahead) > 2 else 0.0  # of three clocks two are right
    for number, seconds in sorted(ahead.items()):
        if abs(seconds - usual) > SKEW_S:
            what = f"its clock is {abs(seconds - usual):.1f} s {'ahead of' if seconds > usual else 'behind'} the others'"
            yield number, what, "let chronyd or ntpd set the clock there"


def _network(examined: Examined) -> Iterator[_Found]:
    is_apart = len({machine.facts.host for machine in examined.machines.values()}) > 1
    failed: dict[int, dict[int, str]] = {}
    for number, way in sorted(examined.ways.items()):
        for name in way.unresolved:
            yield number, f"the name {name} means nothing there", "names that every machine knows (/etc/hosts, DNS), or addresses"
        if is_apart and way.gloo == "lo":
            yield number, "gloo takes the loopback interface, through which no other machine is reached", _ADVICE["GLOO_"]
        for other, why in way.unreached.items():
            failed.setdefault(other, {})[number] = why
    for other, callers in sorted(failed.items()):
        from_ = ", ".join(examined.name(number) for number in sorted(callers))
        what = f"cannot be reached at {':'.join(map(str, examined.machines[other].address))} from {from_}: {next(iter(callers.values()))}"
        yield other, what, "open all TCP ports between the machines, not that of the endpoint alone: gloo and NCCL take any that is free"
    for number, machine in sorted(examined.machines.items()):
        if machine.network == "IB" and not machine.active_adapters:
            what = f"NCCL_NET=IB, and no adapter for InfiniBand is active ({machine.adapters or 'there is none'})"
            yield number, what, "ibstat there says why; cluster=ethernet goes without InfiniBand"


def _sums(examined: Examined) -> Iterator[_Found]:
    """What the ranks measured together, and those that did not come to it."""
    if examined.measured is None:
        return
    for rank, said in sorted(examined.measured.items()):
        if said.wrong:
            advice = "its log, and NCCL_DEBUG=INFO or GLOO_LOG_LEVEL=DEBUG in cluster.env, say more"
            yield said.machine, f"all-reduce on rank {rank}: {said.wrong}", advice
    advice = "+cluster.env.NCCL_DEBUG=INFO shows where NCCL waits; a firewall or an interface that leads elsewhere is the usual cause"
    if not examined.measured and examined.count > 1:
        yield "between the machines", "the all-reduce did not end on any rank", advice
        return
    first = 0
    for number, machine in sorted(examined.machines.items()):  # a machine's ranks are counted one after another
        absent = [rank for rank in range(first, first + machine.facts.processes) if rank not in examined.measured]
        first += machine.facts.processes
        if absent:
            yield number, f"the all-reduce did not end on rank {', '.join(map(str, absent))}", advice


def _speed(examined: Examined) -> Iterator[_Found]:
    """Ranks and links that are slower than the others (`--full`)."""
    measured = examined.measured or {}
    kinds = {said.machine: said.device.partition(":")[0] for said in measured.values()}
    speeds = {rank: said.matmul_tflops for rank, said in measured.items() if said.matmul_tflops is not None}
    for rank, usual in _slow(speeds, lambda rank: _SLOW[kinds[measured[rank].machine]]):
        what = f"rank {rank} multiplies matrices at {speeds[rank]:.3g} TFLOP/s, the others at {usual:.3g}"
        yield measured[rank].machine, what, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE: hot, or held back; top: something else runs there"
    links = {said.machine: said.link_mb_s for said in measured.values() if said.link_mb_s is not None}
    for number, usual in _slow(links, lambda number: _SLOW_LINK[kinds[number]]):
        what = f"{links[number]:.3g} MB/s come from {examined.name((number - 1) % examined.count)}; other links have {usual:.3g}"
        yield number, what, "ethtool and the switch say at which speed the cable runs"


def _slow(values: Mapping[int, float], share: Callable[[int], float]) -> Iterator[tuple[int, float]]:
    """Yield those that have less than a share of the others' median, and that median."""
    for key, value in sorted(values.items()):
        others = [other for each, other in values.items() if each != key]
        if others and value < share(key) * (usual := median(others)):
            yield key, usual


def most_common(values: Sequence[Any]) -> Any:
    """Return the value that most have; of several the one that comes first."""
    return Counter(values).most_common(1)[0][0]
