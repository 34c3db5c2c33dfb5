"""A configuration as a tree of plain values: its keys, its identity, and how two of them differ."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from omegaconf import OmegaConf

ComponentConfig = Mapping[str, Any]
"""A component's part of the configuration: its `_target_` and its arguments."""

WITHOUT_EFFECT_ON_RESULTS = {
    "name": "of the folder",
    "resume": "where a run continues, not what it computes",
    "accept_changed_data": "a code for what the data is: without it there is no run that goes on",
    "after": "when it begins",
    "extra": "read by other keys alone, which count with what they came to",
    "sanity_check": "the state of before is put back",
    "summary": "shown",
    "cluster": "where it runs: trainer.global_batch_size holds the batch that follows from it, and its split changes no gradient",
    "sweep": "which jobs there are, and how they are compared",
    "metrics": "where numbers are written",
    "profile": "measured",
    "checkpoint": "what is kept: going on from any of them gives the same",
    "activation_checkpointing": "the same gradients, to the bit",
    "trainer.grad_accum_steps": "a split of the global batch",
    "trainer.log_every_steps": "how often numbers are written",
    "trainer.optimizer_in_backward": "the same steps, to the bit",
    "loader.micro_batch_size": "a split of the global batch",
    "loader.num_workers": "who reads: each sample has random numbers of its own",
    "health.check_replicas_every_steps": "compared",
    "evaluation.save_predictions": "what is written of the evaluations that there are anyway",
    "debug.faults": "what is put right by resuming without them",
    "debug.max_steps": "an early end: it goes on as the whole run",
}
"""Keys and sections that do not change a run's results, each with the reason. All others do, also a user's own."""


def texts(overrides: Any) -> list[str]:
    """Return overrides as typed, with `${...}` unresolved: the value may be a secret."""
    plain: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(text) for text in plain]


def differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Name the keys that differ between two resolved configs, leaving out those that do not change the results."""
    left, right = ({key: value for key, value in leaves(tree) if changes_results(key)} for tree in (new, old))
    return [
        f"{key}: {right.get(key, '(absent)')} -> {left.get(key, '(absent)')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, "") != right.get(key, "")
    ]


def identity(tree: Mapping[str, Any], *, swept: Sequence[str] = ()) -> str:
    """Return the hash of all keys that change the results: two runs with the same hash compute the same.

    `swept`: keys that count in any case: the jobs of a sweep differ by them.
    """
    counted = ((key, value) for key, value in leaves(tree) if changes_results(key) or any(_is_at(key, name) for name in swept))
    return hashlib.sha256(json.dumps(sorted(counted, key=itemgetter(0)), default=str).encode()).hexdigest()


def dotted_items(tree: Mapping[str, Any], prefix: str = "", *, in_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of everything in a tree, of what is in the items of lists too."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if in_lists and isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value) if isinstance(item, Mapping)}
        if isinstance(value, Mapping):
            yield from dotted_items(value, f"{prefix}{key}.", in_lists=in_lists)


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def replace_values(value: Any, key: str, change: Callable[[str, Any], Any]) -> Any:
    """Return a part of a tree in which `change(dotted name, value)` replaces each value."""
    new = change(key, value)
    if new is not value:
        return new
    if isinstance(value, Mapping):
        return {name: replace_values(inner, f"{key}.{name}" if key else str(name), change) for name, inner in value.items()}
    return [replace_values(inner, f"{key}.{index}", change) for index, inner in enumerate(value)] if isinstance(value, list) else value


def leaves(tree: Mapping[str, Any], *, in_lists: bool = True) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in dotted_items(tree, in_lists=in_lists) if not isinstance(value, Mapping))


def changes_results(key: str) -> bool:
    """Tell whether the value of a key changes what a run computes."""
    return not any(_is_at(key, name) for name in WITHOUT_EFFECT_ON_RESULTS)


def _is_at(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")
