"""Components of any class, made from their nodes and taken for what the run needs: a strategy, callbacks, metric writers.

Each is refused with its key where it lacks something (`require_members`). So are an objective (objective/supervised.py) and a
scheduler (optimizer.py); a data set of another class is wrapped as a data source (loader/dataset_adapter.py).
"""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ddp_train.config import auto
from ddp_train.config.schema import EVENTS
from ddp_train.config.targets.target import WriterFacts
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Callback, MetricWriter, Strategy
from ddp_train.interfaces.adapted import require_members
from ddp_train.interfaces.run import implements
from ddp_train.interfaces.strategy import AdaptedStrategy
from ddp_train.training.instantiate import instantiate


def make_strategy(node: Mapping[str, Any]) -> Strategy:
    strategy = instantiate(node, key="strategy")
    require_members(strategy, Strategy, key="strategy")
    return strategy if isinstance(strategy, Strategy) else AdaptedStrategy(strategy)


def make_writers(nodes: Mapping[str, Any], facts: WriterFacts) -> list[MetricWriter]:
    """Return the metric writers of rank 0."""
    answers = auto.answer({"metrics": nodes}, vars(facts))
    writers = {name: instantiate(node, key=f"metrics.{name}", answers=answers) for name, node in nodes.items() if node}
    for name, writer in writers.items():
        require_members(writer, MetricWriter, key=f"metrics.{name}")
    return [*writers.values()]


def make_callbacks(nodes: Mapping[str, Any]) -> dict[str, Callback]:
    """Return the callbacks by name. Each has an event, and one of all may have weights for evaluation."""
    callbacks = {name: instantiate(node, key=f"callbacks.{name}") for name, node in nodes.items() if node}
    for name, callback in callbacks.items():
        if not any(implements(callback, method) for method in (*EVENTS, "evaluation_weights")):
            happened = f"gave a {type(callback).__name__}, which has none of the methods {', '.join(EVENTS)}"
            expected = "a callback (ddp_train.interfaces.Callback), with at least one of them"
            raise ConfigError(key=f"callbacks.{name}._target_", happened=happened, expected=expected)
        _refuse_misspelt_events(type(callback), key=f"callbacks.{name}._target_")
    averaging = [name for name, callback in callbacks.items() if implements(callback, "evaluation_weights")]
    if len(averaging) > 1:
        key, happened = f"callbacks.{averaging[1]}", f"has weights for evaluation, and callbacks.{averaging[0]} has, too"
        raise ConfigError(key=key, happened=happened, expected="one of them", fix=f"~{key}")
    return callbacks


def _refuse_misspelt_events(kind: type, *, key: str) -> None:
    """Refuse a method that looks like an event and is none: it takes a `run`, has nearly the name, and no method of the class uses it."""
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    used = {name for method in methods.values() for name in method.__code__.co_names}
    for name in methods.keys() - vars(Callback).keys() - used:
        close = get_close_matches(name.removeprefix("on_"), EVENTS, n=1, cutoff=0.7)
        if close and "run" in inspect.signature(methods[name]).parameters:
            happened = f"gave a {kind.__name__}, whose method {name} is no event: it would never be called"
            raise ConfigError(key=key, happened=happened, expected=", ".join(EVENTS), fix=f"did you mean {close[0]}?")
