"""Names in a model's state that do not show whether its own code has compiled it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp_train.interfaces import plain_name


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
