"""The nodes of the evaluation data: the training data's, with what `data.eval` or one of `evaluation.sets` has instead, to any depth.

Imports no torch itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_train.config.schema import EVALUATION_SETS
from ddp_train.config.targets.locate import accepts, look_up_or_none
from ddp_train.config.targets.target import DIRECTIVES


def evaluation_split(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node that makes the evaluation data.

    Args:
        data: the section `data`, whose `eval` has what differs.
    """
    return merged({name: value for name, value in data.items() if name != "eval"}, data["eval"])


def evaluation_sets(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what differs for each evaluation set, by its key: `data.eval` first, then each of `evaluation.sets`; {}: nothing is evaluated.

    Args:
        tree: a configuration, in which more may be wrong.
    """
    data, evaluation = tree.get("data"), tree.get("evaluation")
    found = {"data.eval": data.get("eval") if isinstance(data, Mapping) else None}
    named = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    found |= {f"{EVALUATION_SETS}.{name}": changes for name, changes in (named or {}).items()}
    return {key: changes for key, changes in found.items() if isinstance(changes, Mapping)}


def split_at(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the node of the evaluation set at a key. A named one with a `_target_` of its own is whole: nothing of `data` is in it."""
    changes = evaluation_sets(tree)[key]
    is_whole = key != "data.eval" and "_target_" in changes
    return {**changes} if is_whole else evaluation_split({**tree["data"], "eval": changes})


def set_name(key: str) -> str:
    """Return what the evaluation set at a key is called; "" for `data.eval`."""
    return "" if key == "data.eval" else key.removeprefix(f"{EVALUATION_SETS}.")


def merged(node: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node with changes in it: groups of keys are merged, lists and values are replaced.

    One that names another `_target_` takes over what that has by name, and nothing else: the rest were arguments of another class.
    """
    kept = dict(node)
    if changes.get("_target_", node.get("_target_")) != node.get("_target_"):
        target = look_up_or_none(changes["_target_"])
        kept = {name: value for name, value in node.items() if name not in DIRECTIVES and target and accepts(target, name)}
    for name, value in changes.items():
        before = kept.get(name)
        kept[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return kept
