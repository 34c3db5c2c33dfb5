"""What SLURM tells a task about its step. The batch script has most of these variables too, and is no such task."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

_FIRST_OF_SLURMS_OWN = 0xFFFFFF00  # steps with such numbers are the batch script, an interactive shell and the like


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One step of a SLURM job, from a task's environment."""

    id: str  # job, step, and how often the job was started again: unique to this launch
    node_rank: int  # this node's place among those of the step
    hosts: tuple[str, ...]
    most_tasks: int  # on one node
    is_typed_in: bool = False  # its first task is a shell with a terminal


def slurm_step(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the step that started this process; None: no step did."""
    number, hosts = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NODELIST", "")
    if not number.isdigit() or int(number) >= _FIRST_OF_SLURMS_OWN or not hosts:
        return None
    job, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT") or "0"
    tasks = [int(part) for part in re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))]
    return SlurmStep(
        id=f"{job}.{number}.{restarts}",
        node_rank=int(environment.get("SLURM_NODEID", "0")),
        hosts=tuple(hosts_of(hosts)),
        most_tasks=max(tasks),
        is_typed_in="SLURM_PTY_PORT" in environment,
    )


def hosts_of(text: str) -> Iterator[str]:
    """Return the hosts that `node[01-03,7],login` means, as `scontrol show hostnames` does."""
    return chain.from_iterable(map(_expanded, re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)))


def _expanded(part: str) -> Iterator[str]:
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, after = rest.partition("]")
    for span in numbers.split(","):
        low, dash, high = span.partition("-")
        for number in range(int(low), int(high if dash else low) + 1):
            yield from (f"{prefix}{number:0{len(low)}}{end}" for end in _expanded(after))
