"""Turns the composed config into plain values: interpolations are resolved, except those for values that no file may or can hold.

A secret's `${oc.env:NAME}` stays until a rank needs the value (redaction.py), and so does `${object:torch.float32}`: a configuration names
a type, a class or a function, and the object is looked up when the component is made (targets/target.py).

Then each component gets what its own target takes. `model._target_=my_package.MyModel` keeps the chosen option's other arguments, which are
for another class. Those that the new class takes by name are kept, the others are left out, and one line says so. A typed value, or one
that an experiment has changed, is never left out: if the new class does not take it, that is an error.
"""

import importlib.resources
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_train.config.hydra_internals import register_resolver
from ddp_train.config.schema import KEYS_BESIDE_ARGUMENTS, TARGETS
from ddp_train.config.spelling import text_of
from ddp_train.config.targets.locate import look_up_or_none
from ddp_train.config.targets.target import COMPLETED, DIRECTIVES, RESOLVER, calls_functions, declares, fits, hints_of, parameters_of
from ddp_train.config.tree import ComponentConfig, replace_values, texts
from ddp_train.errors import ConfigError
from ddp_train.system import redaction

_MARK = "\0"  # replaces the braces: text that looks like an interpolation would be resolved again
_EVAL = "eval"


def resolve(config: DictConfig, *, section: str = "") -> tuple[dict[str, Any], list[ConfigError]]:
    """Return a composed config, or one section of it, as plain containers, and an error for every value that cannot be resolved.

    `section`: the name of the section that `config` is; a `???` in it stays, for a later override.
    """
    with _sealed():
        plain, errors = _resolve(config, f"{section}." if section else "", keeps_missing=bool(section))
    sealed = re.compile(f"{_MARK}(.*?){_MARK}")
    return {**replace_values(plain, "", lambda key, value: sealed.sub(r"${\1}", value) if isinstance(value, str) else value)}, errors


def _resolve(section: DictConfig, prefix: str, *, keeps_missing: bool) -> tuple[dict[str, Any], list[ConfigError]]:
    plain: dict[str, Any] = {}
    errors: list[ConfigError] = []
    for name in section:
        key, path = str(name), f"{prefix}{name!s}"  # text, as JSON has it on its way to the other ranks
        if OmegaConf.is_missing(section, name):
            if keeps_missing:
                plain[key] = "???"
                continue
            fix = f"{path}=my_package.MyClass" if name == "_target_" else f"{path}=VALUE"
            errors.append(ConfigError(key=path, happened="has no value yet (???)", fix=fix))
            continue
        try:
            value = section[name]
            if isinstance(value, DictConfig):
                plain[key], inner_errors = _resolve(value, f"{path}.", keeps_missing=keeps_missing)
                errors += inner_errors
            else:
                plain[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            errors.append(ConfigError(key=path, happened=str(error).splitlines()[0], expected="an interpolation that resolves"))
    return plain, errors


@contextmanager
def _sealed() -> Iterator[None]:
    """Keep references to secrets and objects unresolved while the block runs: files, other machines and hashes must not get the values."""

    def env(name: str, *default: Any, _node_: Any) -> Any:
        is_secret = redaction.is_secret_reference(name) or redaction.is_secret_key(str(_node_._get_full_key(None)))
        return f"{_MARK}oc.env:{name}{_MARK}" if name in os.environ and is_secret else oc.env(name, *default)

    register_resolver("oc.env", env)
    register_resolver(RESOLVER, lambda path: f"{_MARK}{RESOLVER}:{path}{_MARK}")
    try:
        yield
    finally:
        register_resolver("oc.env", oc.env)
        OmegaConf.clear_resolver(RESOLVER)


def drop_unused_option_arguments(tree: Mapping[str, Any], hydra: DictConfig | None) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration whose components fit their own targets, and a line for each one from which an argument was left out.

    `hydra`: has the chosen options; None: the configuration was treated before.
    """
    resolved = dict(tree)
    lines: list[str] = []
    for section in TARGETS:
        component_config = tree.get(section)
        option = _option(hydra, section) if hydra is not None and isinstance(component_config, Mapping) else {}
        if hydra is None or component_config is None or option.get("_target_") in (None, "???", component_config.get("_target_")):
            continue
        if (target := look_up_or_none(component_config.get("_target_"))) is not None:
            resolved[section] = _with_accepted_arguments(component_config, option, target, _typed(hydra, section))
            lines += _lines(section, component_config, resolved[section], option)
    return replace_values(resolved, "", _partial), lines


def _partial(key: str, component_config: Any) -> Any:
    """Return a component config with `_partial_: true` if the run calls its target later, with further arguments."""
    if (key in COMPLETED or calls_functions(key)) and isinstance(component_config, Mapping) and "_partial_" not in component_config:
        target = look_up_or_none(component_config.get("_target_"))
        if target is not None and (key in COMPLETED or _needs_arguments(target, component_config)):
            return {**component_config, "_partial_": True}
    return component_config


def _needs_arguments(target: Any, component_config: ComponentConfig) -> bool:
    """Tell whether a function lacks arguments: it is a loss itself, say, and does not return one."""
    if inspect.isclass(target):
        return False
    if (parameters := parameters_of(target)) is None:  # a function in C; none of them makes an objective
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(item.default is item.empty and item.name not in component_config for item in parameters.values() if item.kind in positional)


def _with_accepted_arguments(component_config: ComponentConfig, option: ComponentConfig, target: Any, typed: set[str]) -> dict[str, Any]:
    hints = hints_of(target)
    always_accepted = {*DIRECTIVES, *(key for keys in KEYS_BESIDE_ARGUMENTS.values() for key in keys)}
    accepted = {}
    for name, value in component_config.items():
        is_from_option = name not in typed and _is_from_option(name, value, option)
        if name == _EVAL and isinstance(value, Mapping) and isinstance(option.get(_EVAL), Mapping):
            inner = {key.removeprefix(f"{_EVAL}.") for key in typed if key.startswith(f"{_EVAL}.")}
            changes = _with_accepted_arguments(value, option[_EVAL], target, inner)
            is_changed = inner or any(not _is_from_option(key, changes[key], option[_EVAL]) for key in changes)
            # A dropped argument may have distinguished the splits: then there is no evaluation, rather than one on the training data.
            accepted[name] = changes if is_changed or len(changes) == len(value) else None
        elif not is_from_option or name in always_accepted or (declares(target, name) and (name not in hints or fits(value, hints[name]))):
            accepted[name] = value
    return accepted


def _is_from_option(name: str, value: Any, option: Mapping[str, Any]) -> bool:
    return name in option and (value == option[name] or "${" in str(option[name]))


def _lines(section: str, component_config: ComponentConfig, accepted: ComponentConfig, option: ComponentConfig) -> Iterator[str]:
    """Yield the line about left-out and kept arguments of the option."""
    left_out = [name for name in component_config if name not in accepted]
    is_unevaluated = accepted.get(_EVAL, {}) is None and component_config.get(_EVAL) is not None
    if not left_out and not is_unevaluated:
        return
    taken = [f"{name}={text_of(value)}" for name, value in accepted.items() if name in option and name not in (*DIRECTIVES, _EVAL)]
    line = f"{section:<8} {component_config['_target_']} instead of {option['_target_'].rpartition('.')[2]}:"
    line += f" takes {', '.join(taken) or 'nothing'} of its arguments, not {', '.join(left_out) or 'those of its evaluation split'}"
    yield line + ("; no evaluation: +data.eval.NAME=VALUE says what differs for it" if is_unevaluated else "")


def _typed(hydra: DictConfig, section: str) -> set[str]:
    """Return the arguments of a component that were typed, by their dotted names below it."""
    keys = [text.lstrip("+~").partition("=")[0].strip() for text in texts(hydra.overrides.task)]
    names = [key.removeprefix(f"{section}.") for key in keys if key.startswith(f"{section}.")]
    return {".".join(name.split(".")[:length]) for name in names for length in range(1, 1 + len(name.split(".")))}


def _option(hydra: DictConfig, section: str) -> dict[str, Any]:
    """Return the section in the chosen option of a group, with the options that it is based on; {}: there is none."""
    choice = hydra.runtime.choices.get(section)
    folders = [folder for source in hydra.runtime.config_sources if (folder := folder_of(source.schema, source.path))]
    return _read(folders, section, str(choice), ()) if choice else {}


def folder_of(schema: str, path: str) -> Path | None:
    """Return the folder of a config source; None: Hydra's own, or no folder."""
    if schema == "file":
        return Path(path)
    if schema == "pkg" and path != "hydra.conf":
        return Path(str(importlib.resources.files(path)))
    return None


def _read(folders: list[Path], section: str, option: str, above: tuple[str, ...]) -> dict[str, Any]:
    file = next((path for folder in folders if (path := folder / section / f"{option}.yaml").is_file()), None)
    if file is None or option in above:
        return {}
    content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if not isinstance(content, Mapping):
        return {}
    based_on = [name for name in content.get("defaults") or () if isinstance(name, str) and name != "_self_"]
    inherited = [_read(folders, section, name.removesuffix(".yaml"), (*above, option)) for name in based_on]
    own = content.get(section) if file.read_text().lstrip().startswith("# @package _global_") else content
    layers = [*inherited, {name: value for name, value in (own or {}).items() if name != "defaults"}]
    return {name: value for layer in layers for name, value in layer.items()}
