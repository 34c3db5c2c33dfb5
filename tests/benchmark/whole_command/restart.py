"""A rank is killed; how long is it to the next step?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmark.whole_command.run import Command, run, stamps_in

STEPS = 600
_KILL_AFTER_STEPS = 250
_SETTINGS = ["checkpoint.every_steps=100", "cluster.max_restarts=1"]
_PATIENCE_S = 60


def measure(words: Sequence[str], threads: int) -> dict[str, float]:
    """Run a command of ours, kill -9 one of its ranks in the middle, and return `restart_s`: from there to the end of the next step.

    Raises:
        RuntimeError: the command failed, or went on without a new rank.
    """
    killed: list[tuple[float, set[int]]] = []

    def kill(probes: Path) -> None:
        """Kill the rank that began last, when it is in the middle."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            ranks = stamps_in(probes)
            if ranks and min(len(rank.steps) for rank in ranks) >= _KILL_AFTER_STEPS:
                os.kill(max(rank.pid for rank in ranks), signal.SIGKILL)
                killed.append((time.time(), {rank.pid for rank in ranks}))
                return
            time.sleep(0.02)

    ran = run(Command([*words, *_SETTINGS], STEPS, threads), watch=kill)
    if not killed:
        raise RuntimeError(f"no rank of {' '.join(words)} took {_KILL_AFTER_STEPS} steps in {_PATIENCE_S} s")
    at, before = killed[0]
    first_steps = [rank.steps[0][0] for rank in ran.ranks if rank.pid not in before]
    if not first_steps:
        raise RuntimeError(f"{' '.join(words)}\nwent on without a new rank")
    return {"restart_s": max(first_steps) - at}
