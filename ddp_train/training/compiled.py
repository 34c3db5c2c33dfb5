"""torch.compile before the strategy (`compile=true`), and names that do not show whether a model is compiled."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from ddp_train.distributed.world import World
from ddp_train.interfaces import plain_name

_CACHE, _THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


def compile_model(model: nn.Module, world: World) -> None:
    """Let a model's forward be compiled when it is first called, in place: its parameters keep their names.

    Each rank of a machine has a folder of its own below torch's cache, which stays for the next run: ranks that compile the same at the
    same time would wait for each other's locks. They share the machine's cores. On the device `meta` nothing is called, and nothing done.
    """
    if world.device.type == "meta":
        return
    cache = Path(os.environ.get(_CACHE) or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    own = f"local_rank_{world.local_rank}"
    os.environ[_CACHE] = str(cache if cache.name == own else cache / own)  # of the part of the model before
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault(_THREADS, str(max(1, min(32, cores // world.local_size))))  # 32: torch's own limit
    model.compile()


def use_plain_names(model: nn.Module) -> None:
    """Let a model that its own code has compiled, whole or in parts, have the names in its state that it has without."""
    if all(name == plain_name(name) for name in _names(model)):
        return
    model.register_state_dict_post_hook(_to_plain)
    model.register_load_state_dict_pre_hook(_from_plain)


def _names(model: nn.Module) -> list[str]:
    parts = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return [name for part in parts for name, _ in part]


def _to_plain(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Rename what a module has put into a state, which begins with `prefix`."""
    renamed = {prefix + plain_name(name.removeprefix(prefix)) if name.startswith(prefix) else name: value for name, value in state.items()}
    state.clear()
    state.update(renamed)
    versions: dict[str, Any] = getattr(state, "_metadata", {})
    for name in list(versions):
        versions[_plain_path(name)] = versions.pop(name)


def _from_plain(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
    """Rename it back before it is loaded."""
    for name in _names(module):
        if name != plain_name(name) and prefix + plain_name(name) in state:
            state[prefix + name] = state.pop(prefix + plain_name(name))
    versions: dict[str, Any] = getattr(state, "_metadata", {})
    for name, _module in module.named_modules():
        path = f"{prefix}{name}".rstrip(".")
        if path != _plain_path(path) and _plain_path(path) in versions:
            versions[path] = versions[_plain_path(path)]


def _plain_path(name: str) -> str:
    """Return a module's path without what torch.compile puts into it."""
    return plain_name(f"{name}.").rstrip(".")
