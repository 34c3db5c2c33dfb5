"""What a user sees of a command's speed, ours against a script of torch alone and against the peers that are installed.

    python -m tests.benchmark.whole_command                                        # all rows, 8 pairs: hours on a small machine
    python -m tests.benchmark.whole_command turns                                  # a step of each way, in turns of half a second
    python -m tests.benchmark.whole_command --workloads W1 --tiers user --processes 2 --ways torch ddp-train --pairs 8
    python -m tests.benchmark.whole_command start --processes 1 2 4                # twenty steps: only the start and the end
    python -m tests.benchmark.whole_command restart --other ../before/.venv/bin/python   # kill -9 of a rank to the next step
    python -m tests.benchmark.whole_command table RESULTS.jsonl ...                # of what --save has kept

Workloads: W1 a perceptron 64-256-256-256-10, batch 64; W2s a residual network of 16 channels, batch 16, 3 x 32 x 32; W3 nanoGPT's CPU
setting, batch 12. Tiers: `equal`: the same batches from a batched source, fused AdamW, one parameter group, a line every 50 steps, one
checkpoint at the end; `user`: a data set of single samples, and what each gives a user who changes nothing. Adam is fused everywhere.
Ways take turns, in a random order each round. A ratio is to the first way of the same round. Commands run at a terminal of their own.
With `turns` the commands of a row are all there at once, and all but one are stopped: they meet the same speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmark.machine import processor
from tests.benchmark.whole_command import figures, restart, turns
from tests.benchmark.whole_command.run import Command, adopt_orphans, run
from tests.benchmark.whole_command.ways import DEFAULT, OURS, WAYS, WORKLOADS, Case, missing, versions, with_command

Found = tuple[int, str, Case, dict[str, float]]
"""Round, way, row and numbers of what was measured."""

OTHER = "other"
START_STEPS = 20


def main() -> None:
    """Measure, and print the table."""
    arguments = parsed()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the command that runs is ended, too
    if arguments.what == "table":
        results = [json.loads(line) for path in arguments.results for line in path.read_text().splitlines()]
        reference = arguments.ways[0] if arguments.ways else results[0]["reference"]
    else:
        ways = ways_of(arguments)
        reference = ways[0]
        results = measure(arguments, ways)
    print(f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, ", end="")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    if all("first_step_s" not in result["numbers"] and "wall_ms" in result["numbers"] for result in results):
        print(f"ratios are to `{reference}`, of the sums of all turns, with their standard errors\n")
        print(figures.turns_table(results, reference))
        return
    print(f"ratios are to `{reference}` of the same round, medians with quartiles\n")
    is_restart = all("restart_s" in result["numbers"] for result in results)
    print((figures.restart_table if is_restart else figures.table)(results, reference))


def parsed() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.whole_command", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["steps", "turns", "start", "restart", "table"], default="steps")
    parser.add_argument("results", nargs="*", type=Path, help="for table: files of --save")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), help="default: all; for start and restart W1")
    parser.add_argument("--tiers", nargs="+", choices=["equal", "user"], help="default: both; for start and restart equal")
    parser.add_argument("--processes", nargs="+", type=int, help="default: 1 2; for start 1 2 4, for restart 2")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, OTHER], help=f"the first is what ratios are to; default: {' '.join(DEFAULT)}")
    parser.add_argument("--pairs", type=int, help="rounds; default: 8, for turns 60")
    parser.add_argument("--steps", type=int, help="of each command; default: some four seconds; for turns as many as they need")
    parser.add_argument("--other", type=Path, help=f"the Python of another checkout's environment: the way `{OTHER}`")
    parser.add_argument("--save", type=Path, help="a file to which each result is added, for `table`")
    arguments = parser.parse_intermixed_args()
    is_steps = arguments.what in ("steps", "turns")
    arguments.pairs = arguments.pairs or (60 if arguments.what == "turns" else 8)
    arguments.workloads = arguments.workloads or (list(WORKLOADS) if is_steps else ["W1"])
    arguments.tiers = arguments.tiers or (["equal", "user"] if is_steps else ["equal"])
    arguments.processes = arguments.processes or {"start": [1, 2, 4], "restart": [2]}.get(arguments.what, [1, 2])
    return arguments


def ways_of(arguments: argparse.Namespace) -> list[str]:
    """Return the ways to measure, the reference first; those whose package is not installed are named and left out."""
    ways = arguments.ways or ([OURS] if arguments.what == "restart" else DEFAULT)
    if arguments.other:
        WAYS[OTHER] = with_command(arguments.other.absolute().with_name("ddp-train"))
        ways = ways if OTHER in ways else [OTHER, *ways] if arguments.what == "restart" else [*ways, OTHER]
    for way, package in missing(ways).items():
        print(f"{way} skipped: {package} is not installed (pip install -c constraints.txt {package})")
    return [way for way in ways if way not in missing(ways)]


def measure(arguments: argparse.Namespace, ways: list[str]) -> list[dict[str, Any]]:
    """Run all ways of all rows in turn."""
    results = []
    for number, way, case, found in (in_turns if arguments.what == "turns" else one_by_one)(arguments, ways):
        result = {"round": number, "way": way, "reference": ways[0], **vars(case), "numbers": found}
        results.append(result)
        if arguments.save:
            with arguments.save.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return results


def one_by_one(arguments: argparse.Namespace, ways: list[str]) -> Iterator[Found]:
    """Run one command after another."""
    for number in range(arguments.pairs):
        started = time.time_ns()
        for case in cases(arguments):
            for way in random.sample(ways, len(ways)):
                found = one(arguments.what, way, case)
                shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
                print(f"{number + 1}/{arguments.pairs} {case.workload} {case.tier} {case.processes} {way}: {shown}", file=sys.stderr)
                yield started, way, case, found


def in_turns(arguments: argparse.Namespace, ways: list[str]) -> Iterator[Found]:
    """Run the commands of a row at once, in turns."""
    for case in cases(arguments):
        started = time.time_ns()
        print(f"{case.workload} {case.tier} {case.processes}: {arguments.pairs} turns of each way", file=sys.stderr)
        yield from ((started + number, way, case, found) for number, way, found in turns.measure(case, ways, arguments.pairs))


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the rows."""
    found = []
    for workload in arguments.workloads:
        for tier in arguments.tiers:
            for processes in arguments.processes:
                threads = max(1, (os.cpu_count() or 1) // processes)
                steps = {"start": START_STEPS, "restart": restart.STEPS}.get(arguments.what, WORKLOADS[workload].steps // processes)
                found.append(Case(workload, tier, processes, threads, arguments.steps or steps))
    return found


def one(what: str, way: str, case: Case) -> dict[str, float]:
    """Run one command and return its numbers; a peer's that fails is run once more."""
    words = WAYS[way](case)
    if what == "restart":
        return restart.measure(words, case.threads)
    try:
        ran = run(Command(words, case.steps, case.threads))
    except RuntimeError as error:
        if way == "ddp-train":
            raise
        # torch's own processes are killed at their end by chance ("terminate called without an active exception", pytorch #190489).
        print(f"{error}\nis run once more", file=sys.stderr)
        ran = run(Command(words, case.steps, case.threads))
    return figures.numbers(ran, processes=case.processes, threads=case.threads, steps=case.steps)


if __name__ == "__main__":
    main()
