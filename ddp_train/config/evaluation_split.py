"""The node of the evaluation data: that of the training data, with what `data.eval` has instead, to any depth. Imports no torch itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_train.config.own_target import takes_by_name
from ddp_train.config.target import DIRECTIVES, look_up


def evaluation_split(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node that makes the evaluation data.

    Args:
        data: the section `data`, whose `eval` has what differs.
    """
    return merged({name: value for name, value in data.items() if name != "eval"}, data["eval"])


def merged(node: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node with changes in it: groups of keys are merged, lists and values are replaced.

    One that names another `_target_` takes over what that has by name, and nothing else: the rest were arguments of another class.
    """
    kept = dict(node)
    if changes.get("_target_", node.get("_target_")) != node.get("_target_"):
        target = _target(changes["_target_"])
        kept = {name: value for name, value in node.items() if name not in DIRECTIVES and target and takes_by_name(target, name)}
    for name, value in changes.items():
        before = kept.get(name)
        kept[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return kept


def _target(path: Any) -> Any:
    try:
        return look_up(path)
    except Exception:  # told where targets are checked
        return None
