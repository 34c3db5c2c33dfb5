"""Keys of ours inside the nodes of optimizer and scheduler: groups, rates by layer and by batch, and when a scheduler moves on.

These keys are no arguments of the nodes' classes (`schema.NODE_KEYS`); what they must be is checked here. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.rules import rate_scale
from ddp_train.config.spelling import nearest, removal
from ddp_train.config.targets.evaluation_split import evaluation_sets
from ddp_train.config.targets.target import accepts, look_up, own_keys, takes
from ddp_train.errors import ConfigError


def check(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield what is wrong with our keys in these nodes. What is wrong with the nodes themselves is told elsewhere."""
    for name, look in {"optimizer": _optimizer, "scheduler": _scheduler}.items():
        node = tree.get(name)
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            continue
        try:
            target = look_up(node["_target_"])
        except Exception:  # told where targets are checked
            continue
        yield from look(target, own_keys(node, name), tree)


def follows_a_metric(target: Any) -> bool:
    """Tell whether a scheduler is torch's ReduceLROnPlateau, or a class made of it."""
    return inspect.isclass(target) and any(base.__name__ == "ReduceLROnPlateau" for base in target.__mro__)


def _optimizer(target: Any, ours: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    groups, decay, path = ours.get("groups"), ours.get("layer_decay"), tree["optimizer"]["_target_"]
    sorts_itself = accepts(target, "model")
    yield from rate_scale.check(ours, tree)
    if decay is not None and (isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1):
        yield ConfigError(
            key="optimizer.layer_decay", happened=f"is {decay!r}", expected="a number above 0 and at most 1, or null", fix="0.75 is usual"
        )
    if decay is not None and sorts_itself:
        yield ConfigError(
            key="optimizer.layer_decay",
            happened=f"is given, and {path} takes the model and sorts its parameters itself",
            expected="an optimizer that takes parameter groups, as torch's do",
            fix="optimizer.layer_decay=null, or optimizer=adamw",
        )
    if not isinstance(groups, Mapping | None):
        yield ConfigError(
            key="optimizer.groups",
            happened=f"is {groups!r}",
            expected="a name for each group, and what it has: match, and lr, weight_decay or freeze",
            fix="'+optimizer.groups.head={match: head, lr: 0.01}'",
        )
        return
    for name, group in (groups or {}).items():
        yield from _group(f"optimizer.groups.{name}", group, target, path, sorts_itself=sorts_itself)


def _group(key: str, group: Any, target: Any, path: str, *, sorts_itself: bool) -> Iterator[ConfigError]:
    example = "{match: head, lr: 0.01}"
    if not isinstance(group, Mapping):
        yield ConfigError(key=key, happened=f"is {group!r}", expected="match, and what is other for it", fix=f"'{key}={example}'")
        return
    match, options = group.get("match"), [name for name in group if name not in ("match", "freeze")]
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not patterns or not all(isinstance(each, str) and each for each in patterns):
        yield ConfigError(
            key=f"{key}.match",
            happened="is not given" if match is None else f"is {match!r}",
            expected="a pattern of parameters' names, or a list of them: head, '*.bias', [layers.0,layers.1]",
        )
    if not isinstance(group.get("freeze", False), bool):
        yield ConfigError(key=f"{key}.freeze", happened=f"is {group['freeze']!r}", expected="true or false")
    if group.get("freeze") and options:
        yield ConfigError(
            key=f"{key}.{options[0]}",
            happened="is given with freeze=true, and what is frozen is not trained",
            expected="one of the two",
            fix=f"remove it: {removal(f'{key}.{options[0]}', group[options[0]])}",
        )
    elif not group.get("freeze") and not options:
        yield ConfigError(
            key=key, happened="says nothing but whom it matches", expected="lr, weight_decay or freeze", fix=f"'{key}={example}'"
        )
    for name in options:
        if name == "params" or not takes(target, name):
            known = [each for each in _arguments(target) if each != "params"]
            close = nearest(name, [*known, "match", "freeze"])
            yield ConfigError(
                key=f"{key}.{name}",
                happened=f"{path} has no argument {name!r}",
                expected=f"match, freeze, or one of {', '.join(known)}",
                fix=f"did you mean {key}.{close}?" if close else f"remove it: {removal(f'{key}.{name}', group[name])}",
            )
        elif sorts_itself:
            yield ConfigError(
                key=f"{key}.{name}",
                happened=f"is given, and {path} takes the model and sorts its parameters itself",
                expected="freeze=true alone, or an optimizer that takes parameter groups, as torch's do",
                fix="optimizer=adamw",
            )


def _arguments(target: Any) -> list[str]:
    """Return the names of a class's arguments, but for the first: the parameters."""
    try:
        return list(inspect.signature(target).parameters)[1:]
    except (TypeError, ValueError):
        return []


def _scheduler(target: Any, ours: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    every, metric, follows = ours.get("every"), ours.get("metric"), follows_a_metric(target)
    if every not in (None, "step", "epoch"):
        yield ConfigError(key="scheduler.every", happened=f"is {every!r}", expected="step or epoch")
    elif every == "epoch" and follows:
        yield ConfigError(
            key="scheduler.every",
            happened="is epoch, and ReduceLROnPlateau moves on after each evaluation",
            expected="evaluation.every_steps, which says how often; null there is the end of every epoch",
            fix=f"remove it: {removal('scheduler.every', every)}",
        )
    if metric is not None and not follows:
        yield ConfigError(
            key="scheduler.metric",
            happened=f"is given, and {tree['scheduler']['_target_']} follows none",
            expected="null",
            fix="scheduler.metric=null, or scheduler=plateau",
        )
    elif not isinstance(metric, str | None):
        yield ConfigError(key="scheduler.metric", happened=f"is {metric!r}", expected="the name of a metric of the evaluation, or null")
    if follows and "data" in tree and not evaluation_sets(tree):
        yield ConfigError(
            key="scheduler",
            happened="follows a metric of the evaluation, and data.eval is null: nothing is evaluated",
            expected="an evaluation split, or a scheduler of steps",
            fix="scheduler=warmup_cosine",
        )
