"""From what was noted to numbers: of one command, of the pairs of a row, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmark.whole_command.run import Ran

Numbers = Mapping[str, float]
"""What was measured of one command, by the names of `numbers`."""

Measured = Mapping[str, Any]
"""One line of results: `round`, `way`, the fields of the row (workload, tier, processes, threads, steps) and `numbers`."""

RATIOS = {"first_step_s": "first step", "wall_ms": "wall a step", "cpu_ms": "CPU a step"}
_ROW = ("workload", "tier", "processes", "threads")


def numbers(ran: Ran, *, processes: int, threads: int, steps: int) -> dict[str, float]:
    """Return what one command cost.

    The time of a step is the mean over the last four fifths of the steps: with a median, what is done every 50 steps would be left out.

    Returns:
        `first_forward_s`, `first_step_s`: from the command to the beginning of the last rank's first and second forward.
        `wall_ms`, `cpu_ms`: a step, means over the ranks; the CPU time is that of a rank's process.
        `end_s`: from the end of the last step to the prompt.
        `rank_mib`, `others_mib`: the largest resident set of a rank, and the sum of those of all other processes.
        `command_cpu_s`, `command_s`: the whole command.

    Raises:
        RuntimeError: a rank or a step is missing, or a rank had other threads than it was given.
    """
    if (found := [(len(rank.steps), rank.threads) for rank in ran.ranks]) != [(steps - 1, threads)] * processes:
        raise RuntimeError(f"{processes} ranks with {steps - 1} stamps and {threads} threads expected, found {found}")
    first = steps // 5
    spans = [[last - begin for begin, last in zip(rank.steps[first], rank.steps[-1], strict=True)] for rank in ran.ranks]
    wall_s, cpu_s = (statistics.mean(clock) / (steps - 2 - first) for clock in zip(*spans, strict=True))
    pids = {rank.pid for rank in ran.ranks}
    return {
        "first_forward_s": max(rank.first_forward for rank in ran.ranks) - ran.started,
        "first_step_s": max(rank.steps[0][0] for rank in ran.ranks) - ran.started,
        "wall_ms": 1e3 * wall_s,
        "cpu_ms": 1e3 * cpu_s,
        "end_s": ran.ended - max(rank.steps[-1][0] for rank in ran.ranks) - wall_s,
        "rank_mib": max(ran.memory_mib.get(pid, 0.0) for pid in pids),
        "others_mib": sum(mib for pid, mib in ran.memory_mib.items() if pid not in pids),
        "command_cpu_s": ran.cpu_s,
        "command_s": ran.ended - ran.started,
    }


def ratios(results: Sequence[Measured], way: str, reference: str, name: str) -> list[float]:
    """Return a number of one way over that of the reference, for each round that has both."""
    by_way = {each: {result["round"]: result["numbers"][name] for result in results if result["way"] == each} for each in (way, reference)}
    return [value / by_way[reference][number] for number, value in by_way[way].items() if number in by_way[reference]]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a median with its quartiles; a single value alone."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def rows_of(results: Sequence[Measured]) -> dict[tuple[Any, ...], list[Measured]]:
    """Return the results of each row (workload, tier, processes, threads), in the order in which they were measured."""
    rows: dict[tuple[Any, ...], list[Measured]] = {}
    for result in results:
        rows.setdefault(tuple(result[name] for name in _ROW), []).append(result)
    return rows


def ways_in(row: Sequence[Measured], reference: str) -> list[str]:
    """Return the ways that were measured: the reference, then the others by name."""
    return sorted({result["way"] for result in row}, key=lambda way: (way != reference, way))


def table(results: Sequence[Measured], reference: str) -> str:
    """Return the tables: what a command costs in seconds, milliseconds and MiB, each with its ratios to the reference of the same round."""
    lines = [
        "| workload, tier, processes x threads | way | rounds | "
        + " | ".join(f"{title}, ratio" for title in RATIOS.values())
        + " | first forward s | first step s | wall ms | CPU ms | end s | MiB a rank | MiB others | CPU s of all |",
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for (workload, tier, processes, threads), row in rows_of(results).items():
        for way in ways_in(row, reference):
            of_way = [result["numbers"] for result in row if result["way"] == way]
            paired = [spread(ratios(row, way, reference, name)) for name in RATIOS] if way != reference else ["1"] * len(RATIOS)
            cells = [f"{workload} {tier}, {processes} x {threads}", way, str(len(of_way)), *paired]
            names = {
                "first_forward_s": 2,
                "first_step_s": 2,
                "wall_ms": 3,
                "cpu_ms": 3,
                "end_s": 2,
                "rank_mib": 0,
                "others_mib": 0,
                "command_cpu_s": 1,
            }
            cells += [f"{statistics.median(each[name] for each in of_way):.{digits}f}" for name, digits in names.items()]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def restart_table(results: Sequence[Measured], reference: str) -> str:
    """Return the table of restarts."""
    lines = ["| workload, processes x threads | way | rounds | kill to next step s | ratio |", "|---|---|---|---|---|"]
    for (workload, _, processes, threads), row in rows_of(results).items():
        for way in ways_in(row, reference):
            seconds = [result["numbers"]["restart_s"] for result in row if result["way"] == way]
            ratio = spread(ratios(row, way, reference, "restart_s")) if way != reference else "1"
            lines.append(f"| {workload}, {processes} x {threads} | {way} | {len(seconds)} | {spread(seconds)} | {ratio} |")
    return "\n".join(lines)


def ratio_of_sums(values: Mapping[int, float], references: Mapping[int, float]) -> tuple[float, float]:
    """Return the sum of all turns over that of the reference's, and its standard error; by round."""
    pairs = [(values[number], references[number]) for number in values if number in references]
    found = sum(value for value, _ in pairs) / sum(reference for _, reference in pairs)
    squares = sum((value - found * reference) ** 2 for value, reference in pairs)
    scale = statistics.mean(reference for _, reference in pairs) * math.sqrt(len(pairs) * max(1, len(pairs) - 1))
    return found, math.sqrt(squares) / scale


def turns_table(results: Sequence[Measured], reference: str) -> str:
    """Return the table of turns: what a step costs, and its ratio to the reference's in the same turns with its standard error."""
    lines = ["| workload, tier, processes x threads | way | turns | wall a step, ratio | CPU a step, ratio | wall ms | CPU ms |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for (workload, tier, processes, threads), row in rows_of(results).items():
        by_way = {way: {each["round"]: each["numbers"] for each in row if each["way"] == way} for way in ways_in(row, reference)}
        for way, rounds in by_way.items():
            cells = [f"{workload} {tier}, {processes} x {threads}", way, str(len(rounds))]
            for name in ("wall_ms", "cpu_ms"):
                values, references = ({number: each[name] for number, each in by_way[of].items()} for of in (way, reference))
                cells.append("{:.2f} ± {:.2f}".format(*ratio_of_sums(values, references)) if way != reference else "1")
            cells += [f"{statistics.mean(each[name] for each in rounds.values()):.3f}" for name in ("wall_ms", "cpu_ms")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
