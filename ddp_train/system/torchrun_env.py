"""What torchrun tells its ranks: the only reader of its variables."""

from __future__ import annotations

import os


def is_torchrun_worker() -> bool:
    """Tell whether a torchrun agent started this process.

    RANK alone does not say so: a Kubernetes operator sets it for the whole pod.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def is_last_attempt() -> bool:
    """Tell whether this node's agent has no restart left, so that a failure now is the run's."""
    return restart_count() >= max_restarts()


def restart_count() -> int:
    """Return how often this node's agent has started its ranks again."""
    return _count("TORCHELASTIC_RESTART_COUNT")


def max_restarts() -> int:
    """Return how often it does so at most."""
    return _count("TORCHELASTIC_MAX_RESTARTS")


def _count(variable: str) -> int:
    return int(os.environ.get(variable, "0"))
