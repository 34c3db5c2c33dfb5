"""A configuration as a tree of plain values: its keys, its identity, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf


def texts(overrides: Any) -> list[str]:
    """Return overrides as they were typed: `${...}` in them is not what it stands for, which may be a secret."""
    plain: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(text) for text in plain]


_WITHOUT_EFFECT_ON_RESULTS = (
    *(
        "name",
        "resume",
        "after",
        "sanity_check",
        "summary",
        "extra",
        "cluster",
        "sweep",
        "metrics",
        "checkpoint",
        "evaluation",
    ),
    *("trainer.grad_accum_steps", "trainer.log_every_steps", "trainer.optimizer_in_backward", "health.check_replicas_every_steps"),
    *("loader.micro_batch_size", "loader.num_workers"),
    *("debug.faults", "debug.max_steps", "debug.resume_after_steps", "debug.max_batches"),
)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Name the keys that differ between two resolved configs, leaving out those that do not change the results."""
    left, right = ({key: value for key, value in leaves(tree) if _changes_results(key)} for tree in (ours, theirs))
    return [
        f"{key}: {right.get(key, '(absent)')} -> {left.get(key, '(absent)')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, "") != right.get(key, "")
    ]


def identity(tree: Mapping[str, Any]) -> str:
    """Return the hash of everything that changes the results: two runs with the same one compute the same."""
    text = json.dumps(sorted((key, value) for key, value in leaves(tree) if _changes_results(key)), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def nodes(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every node below, items of lists too."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, list):
            value = {str(place): item for place, item in enumerate(value) if isinstance(item, Mapping)}
        if isinstance(value, Mapping):
            yield from nodes(value, f"{prefix}{key}.")


def at(tree: Mapping[str, Any], key: str) -> Any:
    """Return what stands at a dotted name; None where nothing does."""
    found: Any = tree
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def changed(value: Any, key: str, change: Callable[[str, Any], Any]) -> Any:
    """Return a part of a tree with whatever `change` returns in the place of its values, given their dotted names."""
    found = change(key, value)
    if found is not value:
        return found
    if isinstance(value, Mapping):
        return {part: changed(inner, f"{key}.{part}" if key else str(part), change) for part, inner in value.items()}
    return [changed(inner, f"{key}.{place}", change) for place, inner in enumerate(value)] if isinstance(value, list) else value


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in nodes(tree) if not isinstance(value, Mapping))


def _changes_results(key: str) -> bool:
    return not any(key == other or key.startswith(f"{other}.") for other in _WITHOUT_EFFECT_ON_RESULTS)
