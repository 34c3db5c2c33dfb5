"""All random streams of a process: seeded, read and set."""

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, *, rank: int | None = None) -> None:
    """Seed python, numpy and torch on every device, with another stream for each `rank` (dropout); None: the same (initial weights)."""
    if rank is not None:
        seed = int(np.random.SeedSequence([seed, rank + 1]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def be_deterministic() -> None:
    """Let torch use only algorithms that give the same bits each time; an operation that has none raises a RuntimeError.

    Call it before the process group opens: torch reads this setting when it sets up NCCL. cuBLAS and NCCL also need environment variables
    (`cluster.environment_of`).
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would choose algorithms by their speed


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's random streams as tensors and plain values, which load without executing anything."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937"
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
