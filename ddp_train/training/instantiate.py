"""The one place that lets Hydra call what a `_target_` names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from torch import nn

from ddp_train.config import auto
from ddp_train.config.hydra_internals import IS_1_4
from ddp_train.config.spelling import removal
from ddp_train.config.targets.locate import locate
from ddp_train.config.targets.target import given_in, name_in
from ddp_train.config.tree import nodes
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import MetricWriter
from ddp_train.redaction import reveal

_GET_OBJECT = "hydra.utils.get_object"


def build_writers(nodes: Mapping[str, Any], **run_facts: Any) -> list[MetricWriter]:
    """Build the metric writers of rank 0. An argument that is `auto` takes the run's fact of the same name."""
    answers = auto.answer({"metrics": nodes}, run_facts)
    return [instantiate(node, key=f"metrics.{name}", answers=answers) for name, node in nodes.items() if node]


def instantiate(node: Mapping[str, Any], *, key: str, answers: Mapping[str, Any] | None = None, first: Any = None) -> Any:
    """Create what a node names, after completing it with what only the run knows.

    Args:
        key: the node's config key, for errors.
        answers: values for the arguments that are `auto`, by their keys.
        first: a first positional argument (parameters, a model, an optimizer).

    Raises:
        UserError: its class raised; the message has the config key.
    """
    answers = answers or {}
    filled = {
        name: answers[f"{key}.{name}"] for name in node if f"{key}.{name}" in answers
    }  # as they are, whatever Hydra would make of them
    given = {name: auto.put(value, f"{key}.{name}", answers) for name, value in node.items() if name not in filled}
    gives = _what_is_given(key, first)
    try:
        revealed = reveal(given)
    except KeyError as error:
        raise ConfigError(key=key, happened=f"the environment variable {error} is not set here", fix=f"export {error}=...") from None
    try:
        prepared = {"_convert_": "all", **_prepared(revealed, gives), "_partial_": True}
        make = hydra.utils.instantiate(prepared, **_allowed(prepared))
        make = _with_given(make, node, gives) if gives else make
    except Exception as error:  # of a node inside this one: its cause says more than the words that Hydra puts around it before 1.4
        cause = (isinstance(error, HydraException) and error.__cause__) or error
        refuse_unexpected(cause, node, key)
        cause.add_note(f"config key: {key}")
        raise cause from None
    if node.get("_partial_") and first is None:
        return functools.partial(make, **filled)
    is_given = first is None or _first_name(make.func) in {*make.keywords, *filled}  # as an optimizer around another one
    try:
        return make(*([] if is_given else [first]), **filled)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ConfigError(key=key, happened=f"{node['_target_']}: {error}") from None  # the call itself did not fit
        refuse_unexpected(error, node, key)
        error.add_note(f"config key: {key}")
        raise


def _what_is_given(key: str, first: Any) -> dict[str, Any]:
    """Return what nodes inside a node may lack, by their arguments' names: the optimizer of a schedule, the parameters of an optimizer."""
    if first is None:
        return {}
    names = given_in(key)
    return {"model" if isinstance(first, nn.Module) else "params": first} if "params" in names else dict.fromkeys(names, first)


def _allowed(node: Any) -> dict[str, Any]:
    """Return Hydra 1.4's whitelist: the targets of this node, and no other."""
    return {"_execution_whitelist_": sorted(_targets(node))} if IS_1_4 else {}


def _targets(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        own = {value[name] for name in ("_target_", "path") if isinstance(value.get(name), str) and _is_called(value, name)}
        return own.union(*map(_targets, value.values()))
    return set[str]().union(*map(_targets, value)) if isinstance(value, list) else set()


def _is_called(node: Mapping[str, Any], name: str) -> bool:
    return name == "_target_" or node.get("_target_") == _GET_OBJECT


def _prepared(value: Any, gives: Mapping[str, Any], *, is_inside: bool = False) -> Any:
    """Return a node as Hydra is to make it: objects by their names, and what waits inside it as `_partial_`."""
    if isinstance(value, list):
        return [_prepared(item, gives, is_inside=True) for item in value]
    if not isinstance(value, Mapping):
        name = name_in(value)
        return value if name is None else {"_target_": _GET_OBJECT, "path": name}
    node = {name: _prepared(inner, gives, is_inside=True) for name, inner in value.items()}
    return {**node, "_partial_": True} if gives and is_inside and _waits(value, gives) else node


def _waits(value: Any, gives: Mapping[str, Any]) -> bool:
    """Tell whether a node cannot be made before the run has given something to it, or to one inside it.

    What the user has called `_partial_` waits in a schedule, where it lacks the optimizer. In an optimizer it may be what the outer class
    wants: something to make an optimizer with.
    """
    if isinstance(value, list):
        return any(_waits(item, gives) for item in value)
    if not isinstance(value, Mapping):
        return False
    is_left = "_partial_" in value and "optimizer" not in gives
    if "_target_" in value and not is_left and _lacks(locate(value["_target_"]), value, gives):
        return True
    return any(_waits(inner, gives) for inner in value.values())


def _with_given(made: Any, node: Any, gives: Mapping[str, Any]) -> Any:
    """Return what Hydra has made of a node, where what waited inside has been given what it lacks, and is made."""
    if isinstance(made, functools.partial) and isinstance(node, Mapping):
        inner = {name: _given_to(value, node.get(name), gives) for name, value in made.keywords.items()}
        return functools.partial(made.func, *_given_to(made.args, node.get("_args_"), gives), **inner)
    return made


def _given_to(made: Any, node: Any, gives: Mapping[str, Any]) -> Any:
    if isinstance(made, functools.partial) and isinstance(node, Mapping) and _waits(node, gives):
        waited = _with_given(made, node, gives)
        lacking = _lacks(made.func, node, gives)
        return waited(**lacking) if lacking or "_partial_" not in node else waited
    if isinstance(made, (list, tuple)) and isinstance(node, list):
        return type(made)(_given_to(item, of, gives) for item, of in zip(made, node, strict=True))
    if isinstance(made, dict) and isinstance(node, Mapping):
        return {name: _given_to(item, node.get(name), gives) for name, item in made.items()}
    return made


def _lacks(target: Any, node: Mapping[str, Any], gives: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given arguments that a callable needs and a node does not have."""
    if not gives:
        return {}
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some C extensions have no signature
        return {}
    return {
        name: value
        for name, value in gives.items()
        if name in parameters and parameters[name].default is inspect.Parameter.empty and name not in node
    }


def _first_name(target: Any) -> str:
    """Return what the first argument of a callable is called; "" where that cannot be known."""
    try:
        return next(iter(inspect.signature(target).parameters), "")
    except (TypeError, ValueError):
        return ""


def refuse_unexpected(error: BaseException, node: Mapping[str, Any], key: str) -> None:
    """Refuse an argument that a class passed on (`**kwargs`) to something that does not take it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    for place, value in nodes({key: node}) if found else ():
        if found and place.endswith(f".{found[1]}"):
            fix = f"remove it: {removal(place, value)}"
            raise ConfigError(key=place, happened=f"is passed on to something that does not take it: {error}", fix=fix) from error
