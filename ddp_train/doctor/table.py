"""The result on one screen: a line for each fact, the value on most machines, and the machines that differ."""

from collections.abc import Iterator, Mapping
from statistics import median, mode

from ddp_train.doctor.problems import ClusterReport
from ddp_train.errors import UserError, printable
from ddp_train.launch.node_facts.file_list import FileList

_MAX_NAMED = 6
_MAX_COLUMN = 40  # characters: a longer text moves its own line alone
_GIB = 1 << 30


def screen(report: ClusterReport, problems: list[UserError], *, seconds: float) -> str:
    """Return the table with the duration, and below it the problems with their fixes."""
    rows = [("examined", "on most machines", "the odd one out") if report.count > 1 else ("examined", "here", "")]
    for title, values in _lines(report):
        if values:
            usual = mode(values.values())
            odd = [f"{report.name(number)}: {value}" for number, value in sorted(values.items()) if value != usual]
            rows.append((title, usual, "; ".join(odd[:_MAX_NAMED]) + (f"; and {len(odd) - _MAX_NAMED} more" if odd[_MAX_NAMED:] else "")))
    first, second = (min(_MAX_COLUMN, max(len(row[column]) for row in rows)) for column in (0, 1))
    table = "\n".join(f"{title:<{first}}  {usual:<{second}}  {odd}".rstrip() for title, usual, odd in rows)
    machines = "1 machine" if report.count == 1 else f"{report.count} machines"
    end = "1 problem:" if len(problems) == 1 else f"{len(problems)} problems:" if problems else "fit: nothing is wrong"
    return printable("\n\n".join([f"doctor   {machines}, {report.processes} ranks, {seconds:.1f} s", table, end, *map(str, problems)]))


def _lines(report: ClusterReport) -> Iterator[tuple[str, Mapping[int, str]]]:
    """Yield each line's title, and its value for each machine."""
    machines, peers = report.machines, report.peers
    facts = {number: machine.facts for number, machine in machines.items()}
    yield "processes", {number: str(machine.processes) for number, machine in facts.items()}
    yield "device", {number: f"{machine.device_count} x {machine.device}" for number, machine in facts.items() if machine.device != "cpu"}
    yield "cores", {number: str(machine.device_count) for number, machine in facts.items() if machine.device == "cpu"}
    yield "driver", {number: machine.driver for number, machine in facts.items() if machine.driver}
    for package in ("python", "torch", "ddp_train"):
        yield package, {number: machine.versions[package] for number, machine in facts.items()}
    hashes = [set(machine.source.hashes) for machine in facts.values()]
    common = set.intersection(*hashes) if facts else set()  # a missing file is a problem
    yield "code", dict.fromkeys(facts, f"{len(common)} files")
    for key in facts[min(facts)].data if facts else ():
        yield key, {number: _data(machine.data.get(key)) for number, machine in facts.items()}
    shared = {number: "not shared" if number in peers and peers[number].unseen else "writable" for number in machines}
    yield "run folder", {number: machine.write_error or shared[number] for number, machine in machines.items()}
    yield "free there", {number: f"{machine.free_bytes // _GIB} GiB" for number, machine in machines.items()}
    yield "/dev/shm", {number: _size(machine.shared_memory_bytes, "none") for number, machine in machines.items()}
    yield "open files", {number: str(machine.open_files) for number, machine in machines.items()}
    infiniband = {number: machine for number, machine in machines.items() if machine.adapters}
    yield "locked memory", {number: _size(machine.locked_bytes, "unlimited") for number, machine in infiniband.items()}
    yield "InfiniBand", {number: f"{machine.active_adapters} of {len(machine.adapters)} active" for number, machine in infiniband.items()}
    if report.count > 1:
        yield "clock", {number: f"{ahead:+.0f} s".replace("-0 ", "+0 ") for number, ahead in report.clocks.items()}
        yield "reaches", {number: f"not {len(peer.unreached)}" if peer.unreached else "all others" for number, peer in peers.items()}
    yield "gloo uses", {number: peer.gloo for number, peer in peers.items()}
    yield "NCCL may use", {number: ", ".join(machine.nccl) for number, machine in machines.items() if machine.nccl}
    yield "all-reduce", {number: _sums(report, number) for number in machines}
    measured = (report.measurements or {}).values()
    yield "matmul", _slowest_matmul(report)
    bandwidths = [own.all_reduce_gb_s for own in measured if own.all_reduce_gb_s is not None]
    yield "all-reduce speed", {0: f"{median(bandwidths):.3g} GB/s"} if bandwidths else {}


def _slowest_matmul(report: ClusterReport) -> dict[int, str]:
    """Return the median speed of the ranks, and the slowest rank with its machine; {}: none was measured."""
    measured = [(own.matmul_tflops, own) for own in (report.measurements or {}).values() if own.matmul_tflops is not None]
    if not measured:
        return {}
    speed, slowest = min(measured, key=lambda pair: pair[0])
    usual = median(speed for speed, _ in measured)
    return {0: f"median {usual:.3g} TFLOP/s; slowest rank {slowest.rank} on {report.name(slowest.machine)}, {speed:.3g}"}


def _sums(report: ClusterReport, number: int) -> str:
    if report.measurements is None:
        return "not tried"
    answers, ranks = [own for own in report.measurements.values() if own.machine == number], report.machines[number].facts.processes
    if any(own.wrong for own in answers):
        return "wrong"
    return "exact" if len(answers) >= ranks else f"no answer from {ranks - len(answers)} of {ranks} ranks"


def _data(files: FileList | None) -> str:
    if files is None:
        return "nothing"
    sizes = [size for size in files.sizes.values() if size >= 0]
    return f"{len(sizes)}{'' if files.is_whole else ' or more'} files, {sum(sizes):,} bytes"


def _size(size: int | None, otherwise: str) -> str:
    return otherwise if size is None else f"{size / _GIB:.3g} GiB"
