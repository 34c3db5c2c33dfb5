"""All ways at once, all but one of them stopped: what a step costs on a machine whose speed changes while one looks.

A virtual machine's processors go between two speeds, for seconds or minutes. Commands one after another meet one or the other.
Turns of half a second meet the same.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import mean

from tests.benchmark.whole_command.run import Command, Live, Stamps, stamps_in, start, wait_for_orphans
from tests.benchmark.whole_command.ways import WAYS, WORKLOADS, Case

TURN_S = 0.5
_SETTLES_S = 0.05  # until all processes of a command are awake, and its caches warm
_STARTS_IN_S = 120
_LOOK_EVERY_S = 0.05


def measure(case: Case, ways: Sequence[str], pairs: int) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Start one command of each way, let them go on in turns, and give round, way, and `wall_ms` and `cpu_ms` of a step of each turn.

    Raises:
        RuntimeError: a command failed or ended, or its ranks took fewer than two steps in a turn.
    """
    steps = case.steps * math.ceil(pairs * TURN_S + 4)  # of some four seconds, so that none ends
    with ExitStack() as stack:
        stack.callback(wait_for_orphans)
        live: dict[str, Live] = {}
        for way in ways:
            live[way] = stack.enter_context(start(Command(WAYS[way](replace(case, steps=steps)), steps, case.threads)))
            _wait_for_steps(live[way], case)
            live[way].signal(signal.SIGSTOP)
        turns = [{way: _turn(live[way]) for way in random.sample(ways, len(ways))} for _ in range(pairs)]
        for way, each in live.items():
            if each.process.poll() is not None:
                raise RuntimeError(f"{way} ended in the midst with {each.process.returncode}\n{each.said}")
        stamps = {way: stamps_in(each.probes) for way, each in live.items()}
    for number, turn in enumerate(turns):
        for way, (begin, end) in turn.items():
            yield number, way, step_of(stamps[way], begin, end)


def _wait_for_steps(live: Live, case: Case) -> None:
    """Wait until all ranks have taken the steps of some two seconds: what a command does beside its first steps is over."""
    while True:
        ranks = stamps_in(live.probes)
        if len(ranks) == case.processes and min(len(rank.steps) for rank in ranks) >= WORKLOADS[case.workload].steps // case.processes // 2:
            return
        if live.process.poll() is not None or time.time() > live.started + _STARTS_IN_S:
            raise RuntimeError(f"{' '.join(map(str, live.process.args))}\nhas not started\n{live.said}")  # type: ignore[arg-type]
        time.sleep(_LOOK_EVERY_S)


def _turn(live: Live) -> tuple[float, float]:
    """Let a command go on for one turn; return when it had settled, and when it was stopped."""
    live.signal(signal.SIGCONT)
    begin = time.time()
    time.sleep(TURN_S)
    end = time.time()
    live.signal(signal.SIGSTOP)
    return begin + _SETTLES_S, end


def step_of(ranks: Sequence[Stamps], begin: float, end: float) -> dict[str, float]:
    """Return what a step cost between two times: means over the steps that lie within, and over the ranks.

    Raises:
        RuntimeError: a rank has no such step.
    """
    spans = []
    for rank in ranks:
        within = [step for step in rank.steps if begin <= step[0] <= end]
        if len(within) < 2:
            raise RuntimeError(f"rank {rank.pid} took no whole step in {end - begin:.2f} s")
        spans.append([(last - first) / (len(within) - 1) for first, last in zip(within[0], within[-1], strict=True)])
    wall_s, cpu_s = (mean(each) for each in zip(*spans, strict=True))
    return {"wall_ms": 1e3 * wall_s, "cpu_ms": 1e3 * cpu_s}
