"""What was examined, on one screen: a line for each thing, what most machines have, and who has something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ddp_train.doctor.problems import Examined, most_common
from ddp_train.errors import UserError, printable
from ddp_train.launch.node.files import FileList

_MAX_NAMED = 6
_MAX_COLUMN = 40  # characters: a longer text moves its own line alone
_GIB = 1 << 30


def screen(examined: Examined, found: list[UserError], *, seconds: float) -> str:
    """Return the table with how long it took, and below it the problems with what to do."""
    rows = [("examined", "on most machines", "the odd one out") if examined.count > 1 else ("examined", "here", "")]
    for title, values in _lines(examined):
        if values:
            usual = most_common(list(values.values()))
            odd = [f"{examined.name(number)}: {value}" for number, value in sorted(values.items()) if value != usual]
            rows.append((title, usual, "; ".join(odd[:_MAX_NAMED]) + (f"; and {len(odd) - _MAX_NAMED} more" if odd[_MAX_NAMED:] else "")))
    first, second = (min(_MAX_COLUMN, max(len(row[column]) for row in rows)) for column in (0, 1))
    table = "\n".join(f"{title:<{first}}  {usual:<{second}}  {odd}".rstrip() for title, usual, odd in rows)
    machines = "1 machine" if examined.count == 1 else f"{examined.count} machines"
    end = "1 problem:" if len(found) == 1 else f"{len(found)} problems:" if found else "fit: nothing is wrong"
    head = f"doctor   {machines}, {examined.processes} ranks, {seconds:.1f} s"
    return printable("\n\n".join([head, table, end, *map(str, found)]))


def _lines(examined: Examined) -> Iterator[tuple[str, Mapping[int, str]]]:
    """Yield what a line is about, and what each machine has there."""
    machines, ways = examined.machines, examined.ways
    facts = {number: machine.facts for number, machine in machines.items()}
    yield "processes", {number: str(each.processes) for number, each in facts.items()}
    yield "device", {number: f"{each.device_count} x {each.device}" for number, each in facts.items() if each.device != "cpu"}
    yield "cores", {number: str(each.device_count) for number, each in facts.items() if each.device == "cpu"}
    yield "driver", {number: each.driver for number, each in facts.items() if each.driver}
    for package in ("python", "torch", "ddp_train"):
        yield package, {number: each.versions[package] for number, each in facts.items()}
    common = set.intersection(*(set(each.source.hashes) for each in facts.values())) if facts else set()  # a file too few is a problem
    yield "code", dict.fromkeys(facts, f"{len(common)} files")
    for key in facts[min(facts)].data if facts else ():
        yield key, {number: _data(each.data.get(key)) for number, each in facts.items()}
    shared = {number: "not shared" if number in ways and ways[number].unseen else "writable" for number in machines}
    yield "run folder", {number: machine.writes or shared[number] for number, machine in machines.items()}
    yield "free there", {number: f"{machine.free_bytes // _GIB} GiB" for number, machine in machines.items()}
    yield "/dev/shm", {number: _size(machine.shared_memory_bytes, "none") for number, machine in machines.items()}
    yield "open files", {number: str(machine.open_files) for number, machine in machines.items()}
    infiniband = {number: machine for number, machine in machines.items() if machine.adapters}
    yield "locked memory", {number: _size(machine.locked_bytes, "unlimited") for number, machine in infiniband.items()}
    yield "InfiniBand", {number: f"{each.active_adapters} of {len(each.adapters)} active" for number, each in infiniband.items()}
    if examined.count > 1:
        yield "clock", {number: f"{ahead:+.0f} s".replace("-0 ", "+0 ") for number, ahead in examined.clocks.items()}
        yield "reaches", {number: f"not {len(way.unreached)}" if way.unreached else "all others" for number, way in ways.items()}
    yield "gloo takes", {number: way.gloo for number, way in ways.items()}
    yield "NCCL may take", {number: ", ".join(machine.nccl) for number, machine in machines.items() if machine.nccl}
    yield "all-reduce", {number: _sums(examined, number) for number in machines}
    measured = (examined.measured or {}).values()
    yield "matmul", _slowest({f"rank {each.rank} on {examined.name(each.machine)}": each.matmul_tflops for each in measured}, "TFLOP/s")
    bandwidths = [each.all_reduce_gb_s for each in measured if each.all_reduce_gb_s is not None]
    yield "all-reduce speed", {0: f"{median(bandwidths):.3g} GB/s"} if bandwidths else {}
    links = {f"{examined.name((each.machine - 1) % examined.count)} to {examined.name(each.machine)}": each.link_mb_s for each in measured}
    yield "links", _slowest(links, "MB/s")


def _slowest(speeds: Mapping[str, float | None], unit: str) -> dict[int, str]:
    """Return the median of speeds, and the slowest with its name."""
    known = {name: speed for name, speed in speeds.items() if speed is not None}
    if not known:
        return {}
    slowest = min(known, key=lambda name: known[name])
    return {0: f"median {median(known.values()):.3g} {unit}; slowest {slowest}, {known[slowest]:.3g}"}


def _sums(examined: Examined, number: int) -> str:
    if examined.measured is None:
        return "not tried"
    told, ranks = [each for each in examined.measured.values() if each.machine == number], examined.machines[number].facts.processes
    if any(each.wrong for each in told):
        return "wrong"
    return "exact" if len(told) >= ranks else f"no answer from {ranks - len(told)} of {ranks} ranks"


def _data(files: FileList | None) -> str:
    if files is None:
        return "nothing"
    sizes = [size for size in files.sizes.values() if size >= 0]
    return f"{len(sizes)}{'' if files.is_whole else ' or more'} files, {sum(sizes):,} bytes"


def _size(size: int | None, otherwise: str) -> str:
    return otherwise if size is None else f"{size / _GIB:.3g} GiB"
