"""All that machines and ranks have said, before it is judged: the same on every machine, and comparable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from ddp_train.doctor.machine import MachineReport, PeerReport
from ddp_train.launch.node.differences import differences, fingerprint
from ddp_train.launch.node.facts import GLOO, NCCL

LOOK_WITHIN_S = 60.0
MEET_WITHIN_S = 30.0
_SUMS_WITHIN_S = {"cpu": 30.0, "cuda": 60.0}  # eight CUDA contexts at once take up to 15, NCCL over 64 ranks up to 30
_SUMS_OF_A_RANK_S = 0.5
_SPEEDS_WITHIN_S = 60.0
_BEGINS_WITHIN_S = 110.0  # from a job's begin until its ranks have met: Python, torch, a container

_MAX_COMPARED = 16  # groups of machines that are alike, each with each, to find the one that most agree with


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
    utc: float  # the first machine's clock when it told the others that all are there
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
        """A machine that as many others as possible agree with: who differs from it is the odd one out."""
        alike: dict[str, list[int]] = {}
        for number, machine in sorted(self.machines.items()):
            alike.setdefault(fingerprint(machine.facts), []).append(number)
        groups = sorted(alike.values(), key=len, reverse=True)[:_MAX_COMPARED]
        apart = Counter({group[0]: 0 for group in groups})
        for one, other in combinations(groups, 2):
            ours, theirs = self.machines[one[0]].facts, self.machines[other[0]].facts
            if differences(ours, theirs) or differences(theirs, ours):  # what is missing on the first counts for neither
                apart.update({one[0]: len(other), other[0]: len(one)})
        return min(sorted(apart), key=lambda number: apart[number])


def sums_within_s(device: str, ranks: int, *, is_full: bool) -> float:
    """Return how long the sums may take: only what gives no answer is waited for so long."""
    return _SUMS_WITHIN_S[device] + _SUMS_OF_A_RANK_S * ranks + _SPEEDS_WITHIN_S * is_full


def most_minutes(device: str, ranks: int, *, is_full: bool) -> int:
    """Return in how many minutes an examination has ended, also where nothing answers."""
    seconds = _BEGINS_WITHIN_S + LOOK_WITHIN_S + 3 * MEET_WITHIN_S + sums_within_s(device, ranks, is_full=is_full)
    return math.ceil(seconds / 60)


def blocks_all_reduce(examined: Examined) -> bool:
    """Tell whether something is wrong that a process group would only wait for."""
    facts = [machine.facts for machine in examined.machines.values()]
    is_whole = len(facts) == len(examined.ways) == examined.count
    lacks = any(problem.startswith((GLOO, NCCL)) for each in facts for problem in each.problems)
    is_mixed = len({each.device == "cpu" for each in facts}) > 1  # some would open gloo alone
    is_short = any(each.device != "cpu" and each.device_count < each.processes for each in facts)
    return not is_whole or lacks or is_mixed or is_short or any(way.unreached for way in examined.ways.values())
