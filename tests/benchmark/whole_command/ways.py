"""The command of each way: what a user types, for one workload in one tier."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.benchmark.whole_command.run import SCRIPTS

REFERENCE = "torch"
OURS = "ddp-train"


@dataclass(frozen=True)
class Case:
    """One row of the table but for the way."""

    workload: str
    tier: str  # equal | user
    processes: int
    threads: int  # of each process
    steps: int


@dataclass(frozen=True)
class Workload:
    """What the command line of ours says of a workload; scripts/workloads.py has the same for the peers."""

    model: str
    data: str
    batch_size: int
    objective: str
    steps: int  # of one process in a measurement: about four seconds


WORKLOADS = {
    "W1": Workload("Perceptron", "vectors", 64, "classification", 2000),
    "W2s": Workload("NarrowResNet", "images", 16, "classification", 160),
    "W3": Workload("SmallGPT", "windows", 12, "language_modeling", 160),
}


def ours(case: Case, start: list[str]) -> list[str]:
    """Return `ddp-train` with what a user of his own model and data set types."""
    workload = WORKLOADS[case.workload]
    words = [*start, "data=custom", "model=custom", f"model._target_=workloads.{workload.model}", f"objective={workload.objective}"]
    words += [f"+data.kind={workload.data}", f"+data.num_samples={case.steps * case.processes * workload.batch_size}"]
    words += [f"loader.micro_batch_size={workload.batch_size}", "trainer.max_epochs=1", "cluster.device=cpu", "hydra.run.dir=run"]
    if case.tier == "user":
        return [*words, "data._target_=workloads.samples"]
    words += ["data._target_=workloads.batched", "optimizer.weight_decay=0", "scheduler=constant", "strategy.static_graph=true"]
    return [*words, "~metrics.tensorboard"]


def with_command(script: Path) -> Callable[[Case], list[str]]:
    """Return the way of an installed `ddp-train`."""
    return lambda case: ours(case, [str(script), f"cluster.processes_per_node={case.processes}"])


def with_torchrun(case: Case) -> list[str]:
    """Ours, started by torchrun."""
    return ours(case, [*torchrun(case.processes), "-m", "ddp_train"])


def peer(name: str, *, starts_itself: bool) -> Callable[[Case], list[str]]:
    """Return the way of a script: one that starts its processes itself, or one for torchrun where there are several."""

    def command(case: Case) -> list[str]:
        start = [sys.executable] if starts_itself or case.processes == 1 else torchrun(case.processes)
        script = str(SCRIPTS / f"with_{name}.py")
        return [*start, script, case.workload, case.tier, str(case.steps), str(case.processes)]

    return command


def torchrun(processes: int) -> list[str]:
    """Return torchrun for some processes of this machine."""
    return [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={processes}"]


WAYS: dict[str, Callable[[Case], list[str]]] = {
    REFERENCE: peer("torch", starts_itself=False),
    OURS: with_command(Path(sys.executable).with_name("ddp-train")),
    "fabric": peer("fabric", starts_itself=True),
    "lightning": peer("lightning", starts_itself=True),
    "accelerate": peer("accelerate", starts_itself=False),
    "torchrun-ddp_train": with_torchrun,
}
PACKAGES = {"fabric": "lightning", "lightning": "lightning", "accelerate": "accelerate"}
DEFAULT = [REFERENCE, OURS, *PACKAGES]


def missing(ways: list[str]) -> dict[str, str]:
    """Return the ways whose package is not installed, with the package."""
    installed = versions()
    return {way: PACKAGES[way] for way in ways if way in PACKAGES and PACKAGES[way] not in installed}


def versions() -> dict[str, str]:
    """Return the versions of the packages that are compared, of those that are installed."""
    found = {}
    for name in ("ddp-train", "torch", "lightning", "accelerate"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
