"""What is wrong with callbacks that can be known before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.schema import EVENTS
from ddp_train.config.spelling import nearest
from ddp_train.config.targets.evaluation_split import evaluation_sets
from ddp_train.config.targets.target import locate
from ddp_train.errors import ConfigError

_EARLY_STOPPING = "ddp_train.callbacks.early_stopping.EarlyStopping"


def check(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for a class that would never be called, and for one that waits for evaluations which never are."""
    callbacks, is_evaluated = tree.get("callbacks"), bool(evaluation_sets(tree))
    for name, node in callbacks.items() if isinstance(callbacks, Mapping) else ():
        path = node.get("_target_") if isinstance(node, Mapping) else None
        if not isinstance(path, str):
            continue
        if not path.startswith("ddp_train."):  # ours are callbacks, and importing them would import torch
            yield from _check_events(path, f"callbacks.{name}._target_")
        if path == _EARLY_STOPPING and not is_evaluated and "data" in tree:
            yield ConfigError(
                key=f"callbacks.{name}",
                happened="follows a metric of the evaluation, and data.eval is null: there is none",
                expected="evaluation data",
                fix=f"~callbacks.{name}",
            )


def _check_events(path: str, key: str) -> Iterator[ConfigError]:
    """Yield an error for a class without any event."""
    try:
        target = locate(path)
    except Exception:  # told with the node
        return
    if inspect.isclass(target) and not any(hasattr(target, event) for event in EVENTS):
        own = [method for method in vars(target) if not method.startswith("_")]
        close = next((f"; {method} was meant as {event}?" for method in own if (event := nearest(method.removeprefix("on_"), EVENTS))), "")
        yield ConfigError(
            key=key,
            happened=f"{path} has none of the methods {', '.join(EVENTS)}: it would never be called{close}",
            expected="a callback (`ddp-train help docs/callbacks.md`), with at least one of them",
        )
