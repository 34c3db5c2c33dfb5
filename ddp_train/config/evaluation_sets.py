"""The data of a run: the training data, and evaluation sets, of which the configuration has what differs from it."""

from collections.abc import Mapping
from typing import Any

from ddp_train.config.schema import EVALUATION_SETS
from ddp_train.config.targets.locate import accepts, look_up_or_none
from ddp_train.config.targets.target import DIRECTIVES


def evaluation_sets(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the changes for each evaluation set, by its key: `data.eval` first, then each of `evaluation.sets`; {}: there is none."""
    data, evaluation = tree.get("data"), tree.get("evaluation")
    changes_by_key = {"data.eval": data.get("eval") if isinstance(data, Mapping) else None}
    named = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    changes_by_key |= {f"{EVALUATION_SETS}.{name}": changes for name, changes in (named or {}).items()}
    return {key: changes for key, changes in changes_by_key.items() if isinstance(changes, Mapping)}


def data_node(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the node of the training data (`data`) or of an evaluation set. A named set with its own `_target_` inherits nothing."""
    training_data = {name: value for name, value in tree["data"].items() if name != "eval"}
    if key == "data":
        return training_data
    changes = evaluation_sets(tree)[key]
    return {**changes} if key != "data.eval" and "_target_" in changes else _merged(training_data, changes)


def set_name(key: str) -> str:
    """Return the name of the evaluation set at a key; "" for `data.eval`."""
    return "" if key == "data.eval" else key.removeprefix(f"{EVALUATION_SETS}.")


def _merged(node: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node with changes: groups of keys are merged, lists and values are replaced.

    With another `_target_` the node keeps only the arguments that this class has by name: the others were for another class.
    """
    kept = dict(node)
    if changes.get("_target_", node.get("_target_")) != node.get("_target_"):
        target = look_up_or_none(changes["_target_"])
        kept = {name: value for name, value in node.items() if name not in DIRECTIVES and target and accepts(target, name)}
    for name, value in changes.items():
        before = kept.get(name)
        kept[name] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return kept
