"""The one module that lets Hydra instantiate a `_target_`."""

import functools
import re
import traceback
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
from ddp_train.config.tree import ComponentConfig, dotted_items
from ddp_train.errors import ConfigError, UserError
from ddp_train.system.redaction import reveal

_GET_OBJECT = "hydra.utils.get_object"
_RUN_OBJECTS: ContextVar[Mapping[str, Any]] = ContextVar("run_objects")  # for the components within the present one, by argument name


def instantiate(component_config: ComponentConfig, *, key: str, answers: Mapping[str, Any] | None = None, run_object: Any = None) -> Any:
    """Create the object of a component config, with the arguments that only the run has.

    Args:
        key: where the configuration has it, for errors.
        answers: values for the arguments that are `auto`, by their keys.
        run_object: the first positional argument, an object of the run (parameters, a model, an optimizer).

    Raises UserError: its class raised; the message has the config key.
    """
    answers = answers or {}
    # Hydra does not see these values, and so does not convert them.
    filled = {name: answers[f"{key}.{name}"] for name in component_config if f"{key}.{name}" in answers}
    arguments = {name: auto.with_answers(value, f"{key}.{name}", answers) for name, value in component_config.items() if name not in filled}
    # Components within may lack some arguments: a schedule its optimizer, an optimizer its parameters.
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
    except Exception as error:  # of a component within: its cause says more than Hydra's error around it, before Hydra 1.4
        cause = (isinstance(error, HydraException) and error.__cause__) or error
        refuse_unexpected(cause, component_config, key)
        cause.add_note(f"config key: {key}")
        raise cause from None
    finally:
        _RUN_OBJECTS.reset(token)
    if component_config.get("_partial_") and run_object is None:
        return functools.partial(make, **filled)
    given_names = {*make.keywords, *filled}  # of an optimizer around another one also its first argument
    is_complete = run_object is None or next(iter(parameters_of(make.func) or ()), "") in given_names
    try:
        return make(*([] if is_complete else [run_object]), **filled)
    except UserError as error:
        error.put_under(key)
        raise
    except Exception as error:
        if isinstance(error, TypeError) and not _is_from_within(error):
            raise ConfigError(key=key, happened=f"{component_config['_target_']}: {error}") from None
        refuse_unexpected(error, component_config, key)
        error.add_note(f"config key: {key}")
        raise


def _is_from_within(error: TypeError) -> bool:
    """Tell whether an error is of a component's code, and not of the call itself: a missing argument, an abstract class."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not (frames[-1] == __name__ or frames[-1].partition(".")[0] == "hydra")


def run_gives(name: str) -> Any:
    """Return an object of the run: the `_target_` of an argument that a component within lacks."""
    return _RUN_OBJECTS.get()[name]


def _targets(value: Any) -> set[str]:
    """Return the targets of a component config and of all within it: Hydra 1.4 calls only those."""
    if isinstance(value, Mapping):
        targets = [value.get("_target_"), value.get("path") if value.get("_target_") == _GET_OBJECT else None]
        return {name for name in targets if isinstance(name, str)}.union(*map(_targets, value.values()))
    return set[str]().union(*map(_targets, value)) if isinstance(value, list) else set()


def _prepare(value: Any, run_objects: Mapping[str, Any], *, is_inner: bool = False) -> Any:
    """Return a config for Hydra: with a `_target_` in the place of an object's name, and with the arguments that components within lack.

    A `_partial_` one of the user is completed in a schedule, where it lacks the optimizer. In an optimizer it stays partial: the outer
    class may want a function that makes an optimizer.
    """
    if isinstance(value, list):
        return [_prepare(item, run_objects, is_inner=True) for item in value]
    if not isinstance(value, Mapping):
        name = name_in(value)
        return value if name is None else {"_target_": _GET_OBJECT, "path": name}
    prepared = {name: _prepare(inner, run_objects, is_inner=True) for name, inner in value.items()}
    if is_inner and run_objects and "_target_" in prepared and ("_partial_" not in prepared or "optimizer" in run_objects):
        parameters = parameters_of(locate(prepared["_target_"])) or {}
        needed = [name for name in run_objects if name in parameters and parameters[name].default is Parameter.empty]
        if lacking := [name for name in needed if name not in prepared]:
            prepared.pop("_partial_", None)
            prepared |= {name: {"_target_": f"{__name__}.{run_gives.__name__}", "name": name} for name in lacking}
    return prepared


def refuse_unexpected(error: BaseException, component_config: ComponentConfig, key: str) -> None:
    """Refuse an argument that a class passed on (`**kwargs`) to something that does not take it."""
    argument = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if argument is None or not isinstance(error, TypeError):
        return
    for inner_key, value in dotted_items({key: component_config}):
        if inner_key.endswith(f".{argument[1]}"):
            fix = f"remove it: {removal(inner_key, value)}"
            raise ConfigError(key=inner_key, happened=f"is passed to a function that does not accept it: {error}", fix=fix) from error
