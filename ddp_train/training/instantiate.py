"""The one module that lets Hydra instantiate a `_target_`."""

import functools
import re
from collections.abc import Mapping
from contextvars import ContextVar
from inspect import Parameter
from typing import Any

import hydra.utils
from hydra.errors import HydraException
from torch import nn

from ddp_train.config import auto
from ddp_train.config.hydra_internals import IS_1_4
from ddp_train.config.spelling import removal
from ddp_train.config.targets.locate import locate
from ddp_train.config.targets.target import name_in, parameters_of, run_arguments
from ddp_train.config.tree import dotted_items
from ddp_train.errors import ConfigError, UserError
from ddp_train.system.redaction import reveal

_GET_OBJECT = "hydra.utils.get_object"
_RUN_OBJECTS: ContextVar[Mapping[str, Any]] = ContextVar("run_objects")  # for the inner nodes of the present one, by argument name


def instantiate(node: Mapping[str, Any], *, key: str, answers: Mapping[str, Any] | None = None, run_object: Any = None) -> Any:
    """Create the object of a node, with the arguments that only the run has.

    Args:
        key: the node's config key, for errors.
        answers: values for the arguments that are `auto`, by their keys.
        run_object: the first positional argument, an object of the run (parameters, a model, an optimizer).

    Raises UserError: its class raised; the message has the config key.
    """
    answers = answers or {}
    # Hydra does not see these values, and so does not convert them.
    filled = {name: answers[f"{key}.{name}"] for name in node if f"{key}.{name}" in answers}
    arguments = {name: auto.with_answers(value, f"{key}.{name}", answers) for name, value in node.items() if name not in filled}
    # Inner nodes may lack some arguments: a schedule its optimizer, an optimizer its parameters.
    names = run_arguments(key) if run_object is not None else ()
    called = "model" if isinstance(run_object, nn.Module) else "params"
    run_objects = {called: run_object} if "params" in names else dict.fromkeys(names, run_object)
    try:
        revealed = reveal(arguments)
    except KeyError as error:
        raise ConfigError(key=key, happened=f"the environment variable {error} is not set here", fix=f"export {error}=...") from None
    token = _RUN_OBJECTS.set(run_objects)
    try:
        prepared = {"_convert_": "all", **_prepare(revealed, run_objects), "_partial_": True}
        make = hydra.utils.instantiate(prepared, **({"_execution_whitelist_": sorted(_targets(prepared))} if IS_1_4 else {}))
    except Exception as error:  # of an inner node: its cause says more than Hydra's error around it, before Hydra 1.4
        cause = (isinstance(error, HydraException) and error.__cause__) or error
        refuse_unexpected(cause, node, key)
        cause.add_note(f"config key: {key}")
        raise cause from None
    finally:
        _RUN_OBJECTS.reset(token)
    if node.get("_partial_") and run_object is None:
        return functools.partial(make, **filled)
    given_names = {*make.keywords, *filled}  # of an optimizer around another one also its first argument
    is_complete = run_object is None or next(iter(parameters_of(make.func) or ()), "") in given_names
    try:
        return make(*([] if is_complete else [run_object]), **filled)
    except UserError as error:
        error.put_under(key)
        raise
    except Exception as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ConfigError(key=key, happened=f"{node['_target_']}: {error}") from None  # the call itself did not fit
        refuse_unexpected(error, node, key)
        error.add_note(f"config key: {key}")
        raise


def run_gives(name: str) -> Any:
    """Return an object of the run: the `_target_` of an argument that an inner node lacks."""
    return _RUN_OBJECTS.get()[name]


def _targets(value: Any) -> set[str]:
    """Return all targets of a node and its inner nodes: Hydra 1.4 calls only those."""
    if isinstance(value, Mapping):
        targets = [value.get("_target_"), value.get("path") if value.get("_target_") == _GET_OBJECT else None]
        return {name for name in targets if isinstance(name, str)}.union(*map(_targets, value.values()))
    return set[str]().union(*map(_targets, value)) if isinstance(value, list) else set()


def _prepare(value: Any, run_objects: Mapping[str, Any], *, is_inner: bool = False) -> Any:
    """Return a node for Hydra: with nodes in the place of names of objects, and with the arguments that inner nodes lack.

    A `_partial_` node of the user is completed in a schedule, where it lacks the optimizer. In an optimizer it stays partial: the outer
    class may want a function that makes an optimizer.
    """
    if isinstance(value, list):
        return [_prepare(item, run_objects, is_inner=True) for item in value]
    if not isinstance(value, Mapping):
        name = name_in(value)
        return value if name is None else {"_target_": _GET_OBJECT, "path": name}
    node = {name: _prepare(inner, run_objects, is_inner=True) for name, inner in value.items()}
    if is_inner and run_objects and "_target_" in node and ("_partial_" not in node or "optimizer" in run_objects):
        parameters = parameters_of(locate(node["_target_"])) or {}
        lacking = [name for name in run_objects if name in parameters and parameters[name].default is Parameter.empty and name not in node]
        if lacking:
            node.pop("_partial_", None)
            node |= {name: {"_target_": f"{__name__}.{run_gives.__name__}", "name": name} for name in lacking}
    return node


def refuse_unexpected(error: BaseException, node: Mapping[str, Any], key: str) -> None:
    """Refuse an argument that a class passed on (`**kwargs`) to something that does not take it."""
    argument = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if argument is None or not isinstance(error, TypeError):
        return
    for inner_key, value in dotted_items({key: node}):
        if inner_key.endswith(f".{argument[1]}"):
            fix = f"remove it: {removal(inner_key, value)}"
            raise ConfigError(key=inner_key, happened=f"is passed to a function that does not accept it: {error}", fix=fix) from error
