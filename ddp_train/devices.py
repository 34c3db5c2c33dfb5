"""What this machine has and what started us, read without importing torch."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

CPU_PROCESSES = 2
"""Processes on a machine without a GPU: enough to run the distributed code on a laptop."""


def gpus() -> list[str]:
    """Return the names (for CUDA_VISIBLE_DEVICES) of the GPUs that a process started now would see.

    Workers count again with torch, which knows drivers and MIG; this only decides how many of them to start, and where.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return [name for name in names[: names.index("-1") if "-1" in names else None] if name]  # CUDA ignores all after -1
    return [str(number) for number in range(sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()))]


def count_gpus() -> int:
    """Return how many GPUs a process started now would see."""
    return len(gpus())


def gpu_share(number: int, shares: int) -> list[str]:
    """Return the GPUs of one of several groups that share this machine evenly."""
    each = count_gpus() // shares
    return gpus()[number * each : (number + 1) * each]


def resolve_device(device: str) -> str:
    """Turn `auto` into `cuda` (a GPU is there, and torch was built for it) or `cpu`; other names stay."""
    if device != "auto":
        return device
    return "cuda" if count_gpus() and _torch_has_cuda() else "cpu"


def processes_per_node(configured: int | None, device: str) -> int:
    """Return how many processes one node runs: as configured, else one per GPU, else two on CPU."""
    if configured is not None:
        return configured
    return max(1, count_gpus()) if resolve_device(device) == "cuda" else CPU_PROCESSES


def cores() -> int:
    """Return how many CPU cores this process may use (a container's or SLURM's share, not the machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds the package without importing it
    return spec is not None and spec.origin is not None and any((Path(spec.origin).parent / "lib").glob("*torch_cuda*"))


def is_torchrun_worker() -> bool:
    """Tell whether a torchrun agent started this process.

    RANK alone does not say so: a Kubernetes operator sets it for the whole pod.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ
