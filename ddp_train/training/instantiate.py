"""The one place that lets Hydra call what a `_target_` names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextvars import ContextVar
from inspect import Parameter, signature
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
from ddp_train.system.redaction import reveal

_GET_OBJECT = "hydra.utils.get_object"
_GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("given")  # what the run gives to nodes inside the one that is made


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

    Raises UserError: its class raised; the message has the config key.
    """
    answers = answers or {}
    # Answers go in as they are, whatever Hydra would make of them.
    filled = {name: answers[f"{key}.{name}"] for name in node if f"{key}.{name}" in answers}
    given = {name: auto.put(value, f"{key}.{name}", answers) for name, value in node.items() if name not in filled}
    # What nodes inside this one may lack, by their arguments' names: the optimizer of a schedule, the parameters of an optimizer.
    names = given_in(key) if first is not None else ()
    gives = {"model" if isinstance(first, nn.Module) else "params": first} if "params" in names else dict.fromkeys(names, first)
    try:
        revealed = reveal(given)
    except KeyError as error:
        raise ConfigError(key=key, happened=f"the environment variable {error} is not set here", fix=f"export {error}=...") from None
    token = _GIVEN.set(gives)
    try:
        prepared = {"_convert_": "all", **_prepared(revealed, gives), "_partial_": True}
        make = hydra.utils.instantiate(prepared, **({"_execution_whitelist_": sorted(_targets(prepared))} if IS_1_4 else {}))
    except Exception as error:  # of a node inside this one: its cause says more than the words that Hydra puts around it before 1.4
        cause = (isinstance(error, HydraException) and error.__cause__) or error
        refuse_unexpected(cause, node, key)
        cause.add_note(f"config key: {key}")
        raise cause from None
    finally:
        _GIVEN.reset(token)
    if node.get("_partial_") and first is None:
        return functools.partial(make, **filled)
    is_given = first is None or next(iter(_parameters(make.func)), "") in {*make.keywords, *filled}  # an optimizer around another one
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


def run_gives(name: str) -> Any:
    """Return what the run gives by this name: the `_target_` of an argument that a node inside lacks."""
    return _GIVEN.get()[name]


def _targets(value: Any) -> set[str]:
    """Return what may be called of a node, for Hydra 1.4: its targets, and those inside."""
    if isinstance(value, Mapping):
        own = [value.get("_target_"), value.get("path") if value.get("_target_") == _GET_OBJECT else None]
        return {name for name in own if isinstance(name, str)}.union(*map(_targets, value.values()))
    return set[str]().union(*map(_targets, value)) if isinstance(value, list) else set()


def _prepared(value: Any, gives: Mapping[str, Any], *, is_inside: bool = False) -> Any:
    """Return a node as Hydra is to make it: objects by their names, and nodes inside it with what they lack.

    What the user has called `_partial_` is completed in a schedule, where it lacks the optimizer. In an optimizer it may be what the outer
    class wants: something to make an optimizer with.
    """
    if isinstance(value, list):
        return [_prepared(item, gives, is_inside=True) for item in value]
    if not isinstance(value, Mapping):
        name = name_in(value)
        return value if name is None else {"_target_": _GET_OBJECT, "path": name}
    node = {name: _prepared(inner, gives, is_inside=True) for name, inner in value.items()}
    if is_inside and gives and "_target_" in node and ("_partial_" not in node or "optimizer" in gives):
        parameters = _parameters(locate(node["_target_"]))
        lacking = [name for name in gives if name in parameters and parameters[name].default is Parameter.empty and name not in node]
        if lacking:
            node.pop("_partial_", None)
            node |= {name: {"_target_": f"{__name__}.{run_gives.__name__}", "name": name} for name in lacking}
    return node


def _parameters(target: Any) -> Mapping[str, Parameter]:
    try:
        return signature(target).parameters
    except (TypeError, ValueError):  # some C extensions have no signature
        return {}


def refuse_unexpected(error: BaseException, node: Mapping[str, Any], key: str) -> None:
    """Refuse an argument that a class passed on (`**kwargs`) to something that does not take it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    for place, value in nodes({key: node}) if found else ():
        if found and place.endswith(f".{found[1]}"):
            fix = f"remove it: {removal(place, value)}"
            raise ConfigError(key=place, happened=f"is passed on to something that does not take it: {error}", fix=fix) from error
