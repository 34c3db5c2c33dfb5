"""What was examined, on one screen: a line for each thing, what most machines have, and who has something else."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddp_train.doctor.examined import Examined
from ddp_train.doctor.machine import PeerReport
from ddp_train.doctor.problems import Problem, most_common
from ddp_train.launch.node.files import FileList

_MAX_NAMED = 6
_GIB = 1 << 30


def screen(examined: Examined, found: list[Problem], *, seconds: float) -> str:
    """Return the table, and below it the problems with what to do.

    Args:
        seconds: how long it took.
    """
    columns = shutil.get_terminal_size((120, 24)).columns
    console = Console(file=io.StringIO(), width=max(80, columns), force_terminal=False)
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("examined", no_wrap=True)
    table.add_column("on most machines" if examined.count > 1 else "here")
    if examined.count > 1:
        table.add_column("the odd one out")
    for title, values in _lines(examined):
        if values:
            usual = most_common(list(values.values()))
            odd = [f"{examined.name(number)}: {value}" for number, value in sorted(values.items()) if value != usual]
            shown = "; ".join(odd[:_MAX_NAMED]) + (f"; and {len(odd) - _MAX_NAMED} more" if len(odd) > _MAX_NAMED else "")
            table.add_row(title, escape(usual), *([escape(shown)] if examined.count > 1 else []))
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    table_text = "\n".join(line.rstrip() for line in text.splitlines())
    machines = "1 machine" if examined.count == 1 else f"{examined.count} machines"
    head = f"doctor   {machines}, {examined.processes} ranks, {seconds:.1f} s"
    if not found:
        return f"{head}\n\n{table_text}\n\nfit: nothing is wrong"
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    return "\n\n".join([f"{head}\n\n{table_text}", f"{count}:", *map(str, found)])


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
    yield "run folder", {number: machine.writes or _shared(ways.get(number)) for number, machine in machines.items()}
    yield "free there", {number: f"{machine.free_bytes // _GIB} GiB" for number, machine in machines.items()}
    yield "/dev/shm", {number: _size(machine.shared_memory_bytes) for number, machine in machines.items()}
    yield "open files", {number: str(machine.open_files) for number, machine in machines.items()}
    yield "locked memory", {number: _size(each.locked_bytes, "unlimited") for number, each in machines.items() if each.adapters}
    yield (
        "InfiniBand",
        {n: f"{each.active_adapters} of {len(each.adapters)} active" for n, each in machines.items() if each.adapters},
    )
    if examined.count > 1:
        yield "clock", {number: f"{way.utc - examined.utc:+.0f} s".replace("-0 ", "+0 ") for number, way in ways.items()}
        yield "reaches", {number: f"not {len(way.unreached)}" if way.unreached else "all others" for number, way in ways.items()}
    yield "gloo takes", {number: way.gloo for number, way in ways.items()}
    yield "NCCL may take", {number: ", ".join(machine.nccl) for number, machine in machines.items() if machine.nccl}
    yield "all-reduce", _sums(examined)
    measured = (examined.measured or {}).values()
    speeds = {f"rank {each.rank} on {examined.name(each.machine)}": each.matmul_tflops for each in measured}
    yield "matmul", _slowest(speeds, "TFLOP/s")
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


def _sums(examined: Examined) -> dict[int, str]:
    if examined.measured is None:
        return dict.fromkeys(examined.machines, "not tried")
    shown = {}
    for number, machine in examined.machines.items():
        told, ranks = [each for each in examined.measured.values() if each.machine == number], machine.facts.processes
        whole = "exact" if len(told) >= ranks else f"no answer from {ranks - len(told)} of {ranks} ranks"
        shown[number] = "wrong" if any(each.wrong for each in told) else whole
    return shown


def _data(found: FileList | None) -> str:
    if found is None:
        return "nothing"
    files = [size for size in found.sizes.values() if size >= 0]
    return f"{len(files)}{'' if found.is_whole else ' or more'} files, {sum(files):,} bytes"


def _shared(way: PeerReport | None) -> str:
    return "not shared" if way is not None and way.unseen else "writable"


def _size(size: int | None, otherwise: str = "none") -> str:
    return otherwise if size is None else f"{size / _GIB:.3g} GiB"
