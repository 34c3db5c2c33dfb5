"""What the items that need CUDA decide by: pure functions of recorded facts, tested without a GPU in tests/unit/test_gpu_suite.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SYNCED = "called a synchronizing CUDA operation"
"""What torch warns of in `set_sync_debug_mode("warn")`."""
_SET = re.compile(r"NCCL INFO (NCCL_\w+) set by environment to (.*?)\.?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Sync:
    """One moment at which the host waited for the device."""

    step: int  # optimizer steps taken until then
    where: str  # the innermost frames, outermost first


def stray(syncs: Sequence[Sync], *, every_steps: Sequence[int], last: int) -> list[Sync]:
    """Return the syncs that are neither after a step with a log, save or evaluation nor after the last one.

    A sync of every step shows between these steps, so that none is missed because it also happens at them.

    Args:
        every_steps: the periods of the log, the save and the evaluation.
        last: the last step.
    """
    return [sync for sync in syncs if sync.step != last and all(sync.step % period for period in every_steps)]


def growth(values: Sequence[int], *, settled_after: int) -> int:
    """Return by how much the later values exceed the largest of the first ones; 0: not at all."""
    return max(0, max(values[settled_after:]) - max(values[:settled_after]))


def nccl_environment(log: str) -> dict[str, str]:
    """Return the variables that NCCL says it was given, from a log under NCCL_DEBUG=INFO."""
    return {name: value.strip() for name, value in _SET.findall(log)}


def not_obeyed(wanted: Mapping[str, str], log: str) -> list[str]:
    """Return the variables that NCCL was to have and does not say, or says otherwise."""
    said = nccl_environment(log)
    return [f"{name}: {said.get(name, 'not read')}, not {value}" for name, value in wanted.items() if said.get(name) != value]


_UNITS = {"MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (MiB|GiB)"


def memory_line(output: str) -> dict[str, int]:
    """Return what a run says after its first step of the memory of a GPU: bytes by part, and `at most`."""
    line = next(
        line for line in output.splitlines() if line.startswith("memory ") and " at most " in line
    )  # another one may say what is recomputed
    parts = re.findall(rf"(?:^memory +|, )(\D+?) {_SIZE}", line)
    return {name.strip(): round(float(size) * _UNITS[unit]) for name, size, unit in parts}
