"""What is wrong with the machines of a run: each problem with its host, what it is, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from ddp_train.doctor.machine import MachineReport, PeerReport
from ddp_train.errors import UserError
from ddp_train.launch.node.differences import SKEW_S, differences, fingerprint
from ddp_train.launch.node.facts import GLOO, NCCL

_GIB, _MIB = 1 << 30, 1 << 20
_MIN_FREE_BYTES = _GIB
_MIN_SHARED_BYTES = 512 * _MIB  # docker's default is 64 MiB
_MIN_OPEN_FILES = 1024
_MIN_LOCKED_BYTES = _GIB
_SLOW = {"cpu": 0.5, "cuda": 0.8}  # of the others' median; cores are shared with whatever else runs, GPUs are not
_SLOW_LINK = {"cpu": 0.2, "cuda": 0.5}

_ADVICE = {  # by the beginning of a sentence
    "code: ": "the same code on each machine: stand in a folder that all share, or check out the same commit",
    "data.": "the same files on each machine: a folder that all share, or copy them again",
    "version of ": "install the same versions on each machine",
    "GLOO_": "the name of an interface that each machine has, or cluster.env.GLOO_SOCKET_IFNAME=null: then it is the one on the way there",
    "NCCL_": "the name of an interface that each machine has, or cluster.env.NCCL_SOCKET_IFNAME=null: then NCCL chooses",
    "and ": "as for those before",
    "": "the same command on each machine; only cluster.node_rank is another one",
}

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
    clocks: Mapping[int, float]  # by how many seconds each is ahead of the first one's
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
        """The first machine of those that are alike and most: who differs from it is the odd one out."""
        alike = {number: fingerprint(machine.facts) for number, machine in sorted(self.machines.items())}
        usual = most_common(list(alike.values()))
        return next(number for number, each in alike.items() if each == usual)


def problems(examined: Examined) -> list[UserError]:
    """Return everything that is wrong, each with the host as its key; [] for machines that are fit."""
    silent = [number for number in range(examined.count) if number not in examined.machines]
    found: list[_Found] = [(number, "has said nothing", "its terminal or its log says why") for number in silent]
    for part in (_told, _data, _limits, _folder, _clock, _network, _odd, _sums, _speed) if examined.machines else ():
        found += part(examined)
    return [UserError(key=examined.name(where), happened=what, fix=advice) for where, what, advice in found]


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


def _odd(examined: Examined) -> Iterator[_Found]:
    """Each machine that has another value than most; of two the first is right."""
    machines = dict(sorted(examined.machines.items()))
    facts = [machine.facts for machine in machines.values()]

    def odd(values: Sequence[Any], what: str, advice: str) -> Iterator[_Found]:
        usual = most_common(values)
        return ((number, what.format(own=own, usual=usual), advice) for number, own in zip(machines, values, strict=True) if own != usual)

    what = "runs as user {own}, the others as {usual}: they cannot read each other's files"
    yield from odd([each.uid for each in facts], what, "the same user, with the same number, on each machine")
    what = "has {own}, the others have {usual}: all wait for the slowest at each step"
    yield from odd([each.device for each in facts], what, "machines of one kind; cluster.device says what is used")
    what = "has the NVIDIA driver {own}, the others have {usual}"
    yield from odd([each.driver or "none" for each in facts], what, "the same driver on each machine")
    what = "has {own} active adapters for InfiniBand, the others have {usual}"
    yield from odd([each.active_adapters for each in machines.values()], what, "ibstat there says which port is down")
    if examined.expects_equal:
        advice = "nvidia-smi there says which are missing; cluster.processes_per_node=N where it is meant so"
        gpus = [each.device_count if each.device != "cpu" else 0 for each in facts]
        yield from odd(gpus, "has {own} GPUs, the others have {usual}", advice)


def _folder(examined: Examined) -> Iterator[_Found]:
    """The run's folder: every machine sees what the others write there."""
    writers = {number for number, machine in examined.machines.items() if not machine.writes}
    unseen = {number: set(way.unseen) & writers for number, way in examined.ways.items()}
    if not any(unseen.values()):
        return
    # Who shares the folder with most of the others is right; a machine that does not share it with that one is named.
    apart = Counter(machine for number, others in unseen.items() for other in others for machine in (number, other))
    right = min(sorted(examined.ways), key=lambda number: apart[number])
    what = f"does not share {examined.folder} with {examined.name(right)}: what one writes there the other does not see"
    for number in sorted(set(examined.ways) - {right}):
        if right in unseen[number] or number in unseen[right]:
            yield number, what, "hydra.run.dir=FOLDER on a file system that every machine has mounted (NFS, Lustre), and mounted there"


def _limits(examined: Examined) -> Iterator[_Found]:
    """What a machine has too little of, or does not let a process have."""
    for number, machine in sorted(examined.machines.items()):
        if machine.facts.device != "cpu" and machine.facts.device_count < machine.facts.processes:
            what = f"{machine.facts.processes} processes want a GPU each; it shows {machine.facts.device_count}"
            yield number, what, "nvidia-smi there says which are missing, and dmesg why; or fewer cluster.processes_per_node"
        if machine.writes:
            advice = "hydra.run.dir=FOLDER on a file system that every machine can write to"
            yield number, f"cannot write into {examined.folder}: {machine.writes}", advice
        elif machine.free_bytes < _MIN_FREE_BYTES:
            advice = "remove old runs, checkpoint.keep_last=1, or hydra.run.dir=FOLDER elsewhere"
            yield number, f"{machine.free_bytes / _MIB:.0f} MiB are free where {examined.folder} lies", advice
        if (size := machine.shared_memory_bytes) is None or size < _MIN_SHARED_BYTES:
            what = "there is no /dev/shm" if size is None else f"/dev/shm has {size / _MIB:.0f} MiB; NCCL and data loaders need more"
            yield number, what, "docker run --shm-size=8g (or --ipc=host); mount -o remount,size=8G /dev/shm"
        if machine.open_files < _MIN_OPEN_FILES:
            what = f"a process may have {machine.open_files} open files; connections and data need {_MIN_OPEN_FILES}"
            yield number, what, "ulimit -n 65536; for good in /etc/security/limits.conf, under SLURM in slurmd's service (LimitNOFILE)"
        if machine.adapters and machine.locked_bytes is not None and machine.locked_bytes < _MIN_LOCKED_BYTES:
            what = f"a process may lock {machine.locked_bytes / _MIB:.0f} MiB of memory; InfiniBand locks what it sends"
            yield number, what, "ulimit -l unlimited; docker run --ulimit memlock=-1; under SLURM in slurmd's service (LimitMEMLOCK)"
        if machine.network == "IB" and not machine.active_adapters:
            what = f"NCCL_NET=IB, and no adapter for InfiniBand is active ({machine.adapters or 'there is none'})"
            yield number, what, "ibstat there says why; cluster=ethernet goes without InfiniBand"


def _clock(examined: Examined) -> Iterator[_Found]:
    usual = median(examined.clocks.values()) if len(examined.clocks) > 2 else 0.0  # of three clocks two are right
    for number, seconds in sorted(examined.clocks.items()):
        if abs(seconds - usual) > SKEW_S:
            what = f"its clock is {abs(seconds - usual):.1f} s {'ahead of' if seconds > usual else 'behind'} the others'"
            yield number, what, "let chronyd or ntpd set the clock there"


def _network(examined: Examined) -> Iterator[_Found]:
    is_apart = len({machine.facts.host for machine in examined.machines.values()}) > 1
    for number, way in sorted(examined.ways.items()):
        for name in way.unresolved:
            yield number, f"the name {name} means nothing there", "names that every machine knows (/etc/hosts, DNS), or addresses"
        if is_apart and way.gloo == "lo":
            yield number, "gloo takes the loopback interface, through which no other machine is reached", _ADVICE["GLOO_"]
    for other in sorted({other for way in examined.ways.values() for other in way.unreached}):
        why = {examined.name(number): way.unreached[other] for number, way in sorted(examined.ways.items()) if other in way.unreached}
        address = ":".join(map(str, examined.machines[other].address))
        what = f"cannot be reached at {address} from {', '.join(why)}: {next(iter(why.values()))}"
        yield other, what, "open all TCP ports between the machines, not that of the endpoint alone: gloo and NCCL take any that is free"


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
