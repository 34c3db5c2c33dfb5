"""Checks a component config: its target can be imported, and takes the arguments.

Its schema is its class's signature, so third-party classes are checked like ours, before any process starts.
"""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import re
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ddp_train import FOLDER
from ddp_train.config.schema import EVALUATION_METRICS, EVALUATION_SETS, EVENTS, FULL_KEYS, KEYS_BESIDE_ARGUMENTS
from ddp_train.config.spelling import did_you_mean, instead_of, nearest, override, removal, without_secrets
from ddp_train.config.targets.locate import locate, look_up
from ddp_train.config.tree import ComponentConfig, leaves
from ddp_train.config.values import missed_range
from ddp_train.errors import ConfigError
from ddp_train.traits import Constants, constants_of

AUTO: Final = "auto"  # a value that only the data or the run knows (auto.py)

_OF_DATA = ("image_shape", "num_classes", "vocab_size", "context_length")
FACTS: Mapping[str, tuple[str, ...]] = {
    "model": _OF_DATA,
    "objective": (*_OF_DATA, "ignore_index", "bytes_per_token"),
    "evaluation": (*_OF_DATA, "ignore_index"),
    "scheduler": ("total_steps", "steps_per_epoch"),
    "metrics": ("run_dir", "config", "hyper_parameters", "run_name", "step", "total_steps", "phases", "epoch", "steps_per_epoch", "notes"),
}
"""The facts that answer an argument which is `auto`, by section. A data set may have more; writers' are `interfaces.run.WriterFacts`."""

COMPLETED = ("optimizer", "scheduler")  # sections whose first argument the run adds later: parameters or the model, the optimizer

_RUN_ARGUMENTS = {
    "optimizer": ("params", "model"),
    "scheduler": ("optimizer",),
    "loader.sampler": ("data_source", "dataset", "labels", "seed", "global_batch_size"),
}
"""Arguments that the run adds by name if they are missing, also to components within: a SequentialLR's schedulers share the optimizer."""

DIRECTIVES = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")  # read by Hydra's instantiate itself

_TOOLS = ("os", "posix", "subprocess", "shutil", "sys", "socket", "importlib", "runpy")
_BUILTINS = ("eval", "exec", "compile", "open", "input", "print", "exit", "quit", "__import__")

RESOLVER = "object"
"""`${object:torch.float32}`: a type, a class or a function as an argument, by its name, and not called.

It stays text in config.yaml, in the hash and between processes: `training/instantiate.py` replaces it by the object.
"""


def _import_fails(error: Exception, name: str, *, key: str) -> ConfigError:
    """Return the error for a name that cannot be imported, with the user's line that raised it, if there is one."""
    library_paths = ("site-packages", "dist-packages", "frozen", str(FOLDER), sysconfig.get_path("stdlib"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not any(path in frame.filename for path in library_paths)]
    where = f"\n    {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return ConfigError(key=key, happened=f"cannot import {name}: {type(error).__name__}: {error}{where}")


def check_target(component_config: ComponentConfig, key: str) -> list[ConfigError]:
    """Return the problems of a component config, without those of the ones within it.

    Arguments that the run fills count as given: `auto`s, and those that complete a `_partial_` one.
    """
    path = component_config.get("_target_")
    if not isinstance(path, str) or not path:
        return [ConfigError(key=f"{key}._target_", happened=f"is {path!r}", expected="the dotted path of a class or function")]
    try:
        target = look_up(path)
    except Exception as error:  # a user's module may raise anything while it is imported
        return [_import_fails(error, path, key=f"{key}._target_")]
    if reason := why_no_component(target):
        fix = "a function of your own, in a file in your folder"
        return [ConfigError(key=f"{key}._target_", happened=f"{path} {reason}", expected="a component", fix=fix)]
    if not callable(target):
        return [ConfigError(key=f"{key}._target_", happened=f"{path} is not a class or function")]
    parameters = parameters_of(target)
    if parameters is None:
        return []
    framework = framework_keys(component_config, key)
    arguments = {name: value for name, value in component_config.items() if name not in DIRECTIVES and name not in framework}
    named = [name for name, item in parameters.items() if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL, item.POSITIONAL_ONLY)]
    call = _Call(component_config, key, path, target, parameters, arguments, named)
    return [*call.unknown(), *call.missing(), *call.mistyped(), *call.out_of_range()]


class _Call(NamedTuple):
    """The call that a component config stands for."""

    component_config: ComponentConfig
    key: str
    path: str
    target: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    arguments: Mapping[str, Any]  # that it has
    named: Sequence[str]  # the arguments that can be given by name

    @property
    def is_data(self) -> bool:
        return self.key in ("data", "data.eval") or self.key.startswith(f"{EVALUATION_SETS}.")

    def unknown(self) -> Iterator[ConfigError]:
        takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in self.parameters.values())
        for name in self.arguments:
            is_ours = self.is_data and name in FULL_KEYS and name != "batch_size"  # which must not be passed on silently
            if name not in self.named and (is_ours or not (takes_any or takes(self.target, name))):
                happened, expected = f"{self.path} has no argument {name!r}", ", ".join(self.named) or "no argument"
                yield ConfigError(key=f"{self.key}.{name}", happened=happened, expected=expected, fix=self._instead_of(name))

    def _instead_of(self, name: str) -> str:
        """Return the fix for an argument that the target does not have."""
        key, value = f"{self.key}.{name}", self.arguments[name]
        elsewhere = instead_of(name, without_secrets(key, value))
        if elsewhere.startswith(f"{key}="):  # another component of this section has it
            elsewhere = ""
        if name in FULL_KEYS and not elsewhere:
            elsewhere = override(FULL_KEYS[name], value, was=key)
        close = difflib.get_close_matches(name, self.named, n=1)
        if close and not (elsewhere and self.is_data):
            return did_you_mean(override(f"{self.key}.{close[0]}", value, sign="" if close[0] in self.arguments else "+", was=key))
        return did_you_mean(elsewhere) if elsewhere else f"remove it: {removal(key, value)}"

    def missing(self) -> Iterator[ConfigError]:
        named, target = self.named[len(self.component_config.get("_args_") or ()) :], self.target
        missing = [name for name in named if self.parameters[name].default is inspect.Parameter.empty and name not in self.arguments]
        is_stage = hasattr(target, "__wrapped__") and not inspect.isclass(target) and not inspect.isroutine(target)  # as WebDataset's
        if self.key in COMPLETED:  # the run adds the first one
            missing = [name for name in missing if name != named[0]]
        elif self.component_config.get("_partial_") or is_stage:  # the caller adds the rest
            missing = []
        for name in missing:
            if name not in run_arguments(self.key):
                key, is_fact = f"{self.key}.{name}", not self.is_data and name in FACTS.get(self.key.partition(".")[0], ())
                yield ConfigError(key=key, happened=f"{self.path} needs this argument", fix=f"+{key}={AUTO if is_fact else 'VALUE'}")

    def mistyped(self) -> Iterator[ConfigError]:
        hints = hints_of(self.target)
        for name, value in self.arguments.items():
            if name not in hints or (name in self.parameters and value == self.parameters[name].default) or fits(value, hints[name]):
                continue
            key, wants_text = f"{self.key}.{name}", str in members_of(hints[name]) and not isinstance(value, (list, Mapping))
            fix = f"""'{key}="{value}"'""" if wants_text else ""
            expected = f"a value of type {' or '.join(_spell(kind) for kind in members_of(hints[name]) if not _is_tensor(kind))}"
            yield ConfigError(key=key, happened=f"is {without_secrets(key, value)!r}", expected=expected, fix=fix)

    def out_of_range(self) -> Iterator[ConfigError]:
        for name, bounds in constants_of(self.target, Constants).argument_ranges.items():
            number = self.arguments.get(name)
            if isinstance(number, (int, float)) and (missed := missed_range(number, bounds)):
                yield ConfigError(key=f"{self.key}.{name}", happened=f"is {number}", expected=missed)


def run_arguments(key: str) -> tuple[str, ...]:
    """Return the names of the arguments that the run adds to a component or to those within it."""
    return next((names for section, names in _RUN_ARGUMENTS.items() if f"{key}.".startswith(f"{section}.")), ())


def why_no_component(target: Any) -> str:
    """Return why a target is no component, or "". This guards against mistakes, and is no security boundary (docs/security.md)."""
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__qualname__", ""))
    is_tool = module.partition(".")[0] in _TOOLS or (module in ("builtins", "io", "_io") and name in _BUILTINS)
    return f"is {module}.{name}, a function or class of Python and not a component" if is_tool else ""


def name_in(value: Any) -> str | None:
    """Return the dotted name in a value `${object:NAME}`; None: another value. ValueError: it is only a part of a text."""
    match = re.search(r"\$\{object:([^{}]*)\}", value) if isinstance(value, str) else None
    if match and match[0] != value:
        raise ValueError(f"is {value!r}, and an object cannot be part of a text")
    return match[1].strip() if match else None


def check_events(what: str, methods: Collection[str], *, key: str) -> Iterator[ConfigError]:
    """Check the methods of a callback: an `on_*` is one of the events, and there is an event or `evaluation_weights`."""
    unknown = sorted(name for name in methods if name.startswith("on_") and name not in EVENTS)
    for name in unknown:
        happened = f"{what} has a method {name}, which is no event: it would never be called"
        close = nearest(name, EVENTS)
        yield ConfigError(key=key, happened=happened, expected=", ".join(EVENTS), fix=f"did you mean {close}?" if close else "another name")
    if not unknown and not {*EVENTS, "evaluation_weights"} & {*methods}:
        happened = f"{what} has none of the methods {', '.join(EVENTS)}: it would never be called"
        expected = "a callback (`ddp-train help docs/callbacks.md`), with at least one of them"
        yield ConfigError(key=key, happened=happened, expected=expected)


def check_object_names(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each wrong `${object:NAME}`: there is no such object, or it is a tool."""
    for key, value in leaves(tree):
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            at = f"{key}.{index}" if isinstance(value, list) else key
            try:
                name = name_in(item)
                reason = why_no_component(locate(name)) if name is not None else ""
            except ValueError as error:
                yield ConfigError(key=at, happened=str(error), expected="${object:NAME} alone, as a whole argument")
            except Exception as error:  # a user's module may raise anything while it is imported
                yield _import_fails(error, str(name), key=at)
            else:
                if reason:
                    yield ConfigError(key=at, happened=f"{name} {reason}", expected="a type, or a class or function of a component")


def parameters_of(target: Callable[..., Any], *, follow_wrapped: bool = True) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a callable by name; None: it has no signature, as some C extensions."""
    try:
        return inspect.signature(target, follow_wrapped=follow_wrapped).parameters
    except (TypeError, ValueError):
        return None


def takes(target: Callable[..., Any], name: str) -> bool:
    """Tell whether a callable can be called with an argument of this name: it has one, or takes any (`**kwargs`)."""
    signatures = [parameters_of(target, follow_wrapped=is_followed) for is_followed in (True, False)]
    return any(items is None or name in items or any(item.kind is item.VAR_KEYWORD for item in items.values()) for items in signatures)


def declares(target: Callable[..., Any], name: str) -> bool:
    """Tell whether a signature has an argument of this name; that of a class with `**kwargs` also has its bases' arguments."""
    bases = target.__mro__ if inspect.isclass(target) else ()
    for make in [target, *(vars(base)["__init__"] for base in bases if "__init__" in vars(base))]:
        parameters = parameters_of(make) or {}
        if name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            return True
        if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
            return False
    return False


def framework_keys(component_config: ComponentConfig, key: str) -> dict[str, Any]:
    """Return a component's keys that are ours and no arguments of its class: `optimizer.groups`, `scheduler.every` and the like."""
    target = look_up(component_config["_target_"])
    ours = KEYS_BESIDE_ARGUMENTS.get(key, ())
    return {name: component_config[name] for name in ours if name in component_config and not declares(target, name)}


def calls_functions(key: str) -> bool:
    """Tell whether the run may call a component's function itself: a loss, a metric, a collate function."""
    return key in ("objective", "loader.collate") or (key.startswith(f"{EVALUATION_METRICS}.") and key.count(".") == 2)


def follows_a_metric(target: object) -> bool:
    """Tell whether a scheduler is torch's ReduceLROnPlateau, or a class made of it."""
    return inspect.isclass(target) and any(base.__name__ == "ReduceLROnPlateau" for base in target.__mro__)


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of a callable's arguments; {}: they cannot be read."""
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # names that exist only for type checkers, and worse: then types are not checked
        return {}


def admits_text(hint: Any) -> bool:
    return any(member is str or AUTO in typing.get_args(member) for member in members_of(hint))


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a YAML value fits a type hint; in doubt it does. A component fits every hint."""
    is_component = isinstance(value, Mapping) and "_target_" in value
    if value == AUTO or is_component or (isinstance(value, str) and value.startswith(f"${{{RESOLVER}:")):
        return True
    return any(_fits_one(value, member) for member in members_of(hint))


def _fits_one(value: Any, member: Any) -> bool:
    origin = typing.get_origin(member) or member
    if origin is typing.Literal:
        return value in typing.get_args(member)
    if _is_tensor(member):
        return False
    if origin in (int, float, bool, str, complex, type(None)):
        return type(value) is origin or (origin is float and type(value) is int)
    if origin in (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, list) or (isinstance(value, str) and origin in (collections.abc.Sequence, collections.abc.Iterable))
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, Mapping)
    return True


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; of any other hint the hint alone."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


def _is_tensor(member: Any) -> bool:
    return getattr(member, "__name__", "") == "Tensor"


def _spell(member: Any) -> str:
    if typing.get_origin(member) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(member)))
    kind = typing.get_origin(member) or member
    return "null" if kind is type(None) else str(getattr(kind, "__name__", kind))
