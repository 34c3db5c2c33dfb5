"""What is wrong with the machines of a run: the host of each problem, what it is, and the fix."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, mode
from typing import Any

from ddp_train.doctor.machine import MachineReport, PeerReport
from ddp_train.errors import UserError
from ddp_train.launch.node_facts.differences import SKEW_S, differences, fingerprint
from ddp_train.launch.node_facts.facts import GLOO, NCCL

_GIB, _MIB = 1 << 30, 1 << 20
_MIN_FREE_BYTES = _GIB
_MIN_SHARED_BYTES = 512 * _MIB  # docker's default is 64 MiB
_MIN_OPEN_FILES = 1024
_MIN_LOCKED_BYTES = _GIB
_SLOW = {"cpu": 0.5, "cuda": 0.8}  # of the others' median; cores are shared with whatever else runs, GPUs are not

_ADVICE = {  # by the beginning of a sentence
    "code: ": "use the same code on each machine: cd to a shared folder, or check out the same commit",
    "data.": "use the same files on each machine: a shared folder, or copy them again",
    "version of ": "install the same versions on each machine",
    "GLOO_": "the name of an interface that each machine has, or cluster.env.GLOO_SOCKET_IFNAME=null: then gloo uses the route there",
    "NCCL_": "the name of an interface that each machine has, or cluster.env.NCCL_SOCKET_IFNAME=null: then NCCL chooses",
    "and ": "the same as above",
    "": "type the same command on each machine; only cluster.node_rank differs",
}

_Finding = tuple[int | str, str, str]  # which machine, or the names of several; what is wrong; the fix


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A rank's report about its sums with the others."""

    rank: int
    machine: int
    device: str = ""
    wrong: str = ""  # the first wrong result, or the error
    matmul_tflops: float | None = None
    all_reduce_gb_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    count: int  # of machines
    processes: int  # of ranks
    folder: str
    machines: Mapping[int, MachineReport]
    peers: Mapping[int, PeerReport]
    clocks: Mapping[int, float]  # seconds that a machine's clock is ahead of the first one's
    measurements: Mapping[int, Measurement] | None  # by rank; None: it was not tried
    downloads: bool = False  # the data set downloads missing files
    expects_equal: bool = True  # no number of processes was given: each machine should have as many GPUs as the others

    def name(self, number: int | str) -> str:
        """Return a machine's name; names of several machines are returned as they are."""
        if isinstance(number, str):
            return number
        if number not in self.machines:
            return f"machine {number}"
        host = self.machines[number].facts.host
        is_alone = sum(other.facts.host == host for other in self.machines.values()) == 1
        return host if is_alone else f"{host} (machine {number})"

    @cached_property
    def usual(self) -> int:
        """The first machine of the largest group of equal ones; others are compared with it."""
        fingerprints = {number: fingerprint(machine.facts) for number, machine in sorted(self.machines.items())}
        usual = mode(fingerprints.values())
        return next(number for number, own in fingerprints.items() if own == usual)


def problems(report: ClusterReport) -> list[UserError]:
    """Return everything that is wrong, with the host as the key; []: the machines are fit."""
    silent = [number for number in range(report.count) if number not in report.machines]
    findings: list[_Finding] = [(number, "sent no report", "see its terminal or its log") for number in silent]
    if report.machines:
        for check in (_differences, _data, _limits, _folder, _clock, _network, _outliers, _sums, _speed):
            findings += check(report)
    return [UserError(key=report.name(where), happened=what, fix=advice) for where, what, advice in findings]


def blocks_all_reduce(report: ClusterReport) -> bool:
    """Tell whether something is wrong that would let a process group wait for ever."""
    facts = [machine.facts for machine in report.machines.values()]
    is_whole = len(facts) == len(report.peers) == report.count
    lacks = any(problem.startswith((GLOO, NCCL)) for machine in facts for problem in machine.problems)
    is_mixed = len({machine.device == "cpu" for machine in facts}) > 1  # some would open gloo alone
    is_short = any(machine.device != "cpu" and machine.device_count < machine.processes for machine in facts)
    return not is_whole or lacks or is_mixed or is_short or any(peer.unreached for peer in report.peers.values())


def _differences(report: ClusterReport) -> Iterator[_Finding]:
    """Problems that a machine has found itself, and differences between its facts and the usual machine's."""
    for number, machine in sorted(report.machines.items()):
        for sentence in [*machine.facts.problems, *differences(report.machines[report.usual].facts, machine.facts)]:
            yield number, sentence, next(advice for beginning, advice in _ADVICE.items() if sentence.startswith(beginning))


def _data(report: ClusterReport) -> Iterator[_Finding]:
    """Data that is missing on all machines; missing on one machine, it is a difference."""
    for key in () if report.downloads else report.machines[report.usual].facts.data:
        if all(machine.facts.data.get(key) is None for machine in report.machines.values()):
            hosts = ", ".join(report.name(number) for number in sorted(report.machines))
            yield hosts, f"{key}: this path does not exist", f"put the data there, or {key}=PATH"


def _outliers(report: ClusterReport) -> Iterator[_Finding]:
    """Each machine that has another value than most; of two the first is right."""
    machines = dict(sorted(report.machines.items()))
    facts = [machine.facts for machine in machines.values()]

    def outliers(values: Sequence[Any], what: str, advice: str) -> Iterator[_Finding]:
        usual = mode(values)
        return ((number, what.format(own=own, usual=usual), advice) for number, own in zip(machines, values, strict=True) if own != usual)

    what = "runs as user {own}, the others as {usual}: they cannot read each other's files"
    yield from outliers([machine.uid for machine in facts], what, "run as the same user with the same uid on each machine")
    what = "has {own}, the others have {usual}: all wait for the slowest at each step"
    yield from outliers([machine.device for machine in facts], what, "use machines of one kind; cluster.device selects the device")
    what = "has the NVIDIA driver {own}, the others have {usual}"
    yield from outliers([machine.driver or "none" for machine in facts], what, "install the same driver on each machine")
    what = "has {own} active adapters for InfiniBand, the others have {usual}"
    yield from outliers([machine.active_adapters for machine in machines.values()], what, "ibstat there shows which port is down")
    if report.expects_equal:
        advice = "nvidia-smi there shows which are missing; cluster.processes_per_node=N if it is intended"
        gpus = [machine.device_count if machine.device != "cpu" else 0 for machine in facts]
        yield from outliers(gpus, "has {own} GPUs, the others have {usual}", advice)


def _folder(report: ClusterReport) -> Iterator[_Finding]:
    """The run's folder: each machine that sees other files there than most; every machine has written one."""
    writers = frozenset(number for number, machine in report.machines.items() if not machine.write_error)
    seen = {number: writers.difference(peer.unseen) for number, peer in sorted(report.peers.items())}
    usual = mode(seen.values()) if seen else writers
    for number, files in seen.items():
        if files != usual:
            what = f"does not share {report.folder} with the others: files written on one are missing on the other"
            yield number, what, "hydra.run.dir=FOLDER on a shared file system (NFS, Lustre) that every machine mounts at the same path"


def _limits(report: ClusterReport) -> Iterator[_Finding]:
    """Resources that a machine lacks, or does not let a process use."""
    for number, machine in sorted(report.machines.items()):
        if machine.facts.device != "cpu" and machine.facts.device_count < machine.facts.processes:
            what = f"{machine.facts.processes} processes need a GPU each; it has {machine.facts.device_count}"
            yield number, what, "nvidia-smi there shows which are missing, and dmesg why; or lower cluster.processes_per_node"
        if machine.write_error:
            advice = "hydra.run.dir=FOLDER on a file system that every machine can write to"
            yield number, f"cannot write into {report.folder}: {machine.write_error}", advice
        elif machine.free_bytes < _MIN_FREE_BYTES:
            advice = "remove old runs, checkpoint.keep_last=1, or hydra.run.dir=FOLDER elsewhere"
            yield number, f"{machine.free_bytes / _MIB:.0f} MiB are free on the disk of {report.folder}", advice
        if (size := machine.shared_memory_bytes) is None or size < _MIN_SHARED_BYTES:
            what = "there is no /dev/shm" if size is None else f"/dev/shm has {size / _MIB:.0f} MiB; NCCL and data loaders need more"
            yield number, what, "docker run --shm-size=8g (or --ipc=host); mount -o remount,size=8G /dev/shm"
        if machine.open_files < _MIN_OPEN_FILES:
            what = f"a process may have {machine.open_files} open files; connections and data need {_MIN_OPEN_FILES}"
            yield number, what, "ulimit -n 65536; permanently in /etc/security/limits.conf, under SLURM in slurmd's service (LimitNOFILE)"
        if machine.adapters and machine.locked_bytes is not None and machine.locked_bytes < _MIN_LOCKED_BYTES:
            what = f"a process may lock {machine.locked_bytes / _MIB:.0f} MiB of memory; InfiniBand locks what it sends"
            yield number, what, "ulimit -l unlimited; docker run --ulimit memlock=-1; under SLURM in slurmd's service (LimitMEMLOCK)"
        if machine.network == "IB" and not machine.active_adapters:
            what = f"NCCL_NET=IB, but no InfiniBand adapter is active ({machine.adapters or 'there is none'})"
            yield number, what, "ibstat there shows why; cluster=ethernet runs without InfiniBand"


def _clock(report: ClusterReport) -> Iterator[_Finding]:
    usual = median(report.clocks.values()) if len(report.clocks) > 2 else 0.0  # of three clocks two are right
    for number, seconds in sorted(report.clocks.items()):
        if abs(seconds - usual) > SKEW_S:
            what = f"its clock is {abs(seconds - usual):.1f} s {'ahead of' if seconds > usual else 'behind'} the others'"
            yield number, what, "let chronyd or ntpd set the clock there"


def _network(report: ClusterReport) -> Iterator[_Finding]:
    is_apart = len({machine.facts.host for machine in report.machines.values()}) > 1
    for number, peer in sorted(report.peers.items()):
        for name in peer.unresolved:
            yield number, f"this machine cannot resolve the name {name}", "use names in DNS or every /etc/hosts, or addresses"
        if is_apart and peer.gloo == "lo":
            yield number, "gloo uses the loopback interface, which reaches no other machine", _ADVICE["GLOO_"]
    for other in sorted({other for peer in report.peers.values() for other in peer.unreached}):
        why = {report.name(number): peer.unreached[other] for number, peer in sorted(report.peers.items()) if other in peer.unreached}
        address = ":".join(map(str, report.machines[other].address))
        what = f"cannot be reached at {address} from {', '.join(why)}: {next(iter(why.values()))}"
        yield other, what, "open all TCP ports between the machines, not only the endpoint's: gloo and NCCL use any free port"


def _sums(report: ClusterReport) -> Iterator[_Finding]:
    """Wrong sums, and ranks whose sum did not end."""
    if report.measurements is None:
        return
    for rank, measurement in sorted(report.measurements.items()):
        if measurement.wrong:
            advice = "see its log; NCCL_DEBUG=INFO or GLOO_LOG_LEVEL=DEBUG in cluster.env shows more"
            yield measurement.machine, f"all-reduce on rank {rank}: {measurement.wrong}", advice
    advice = "+cluster.env.NCCL_DEBUG=INFO shows where NCCL waits; a firewall or a wrong interface is the usual cause"
    if not report.measurements and report.count > 1:
        yield "between the machines", "the all-reduce did not end on any rank", advice
        return
    first = 0
    for number, machine in sorted(report.machines.items()):  # a machine's ranks are counted one after another
        absent = [rank for rank in range(first, first + machine.facts.processes) if rank not in report.measurements]
        first += machine.facts.processes
        if absent:
            yield number, f"the all-reduce did not end on rank {', '.join(map(str, absent))}", advice


def _speed(report: ClusterReport) -> Iterator[_Finding]:
    """Ranks that are slower than the median of the others (`--full`)."""
    measurements = report.measurements or {}
    speeds = {rank: own.matmul_tflops for rank, own in sorted(measurements.items()) if own.matmul_tflops is not None}
    for rank, speed in speeds.items():
        others = [other for other_rank, other in speeds.items() if other_rank != rank]
        own = measurements[rank]
        if others and speed < _SLOW[own.device.partition(":")[0]] * (usual := median(others)):
            what = f"rank {rank} multiplies matrices at {speed:.3g} TFLOP/s, the others at {usual:.3g}"
            advice = "check for heat or throttling (nvidia-smi -q -d PERFORMANCE,TEMPERATURE) and for other programs (top)"
            yield own.machine, what, advice
