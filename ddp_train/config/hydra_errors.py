"""Find every mistake of a command line that Hydra refuses, not only the first one that it met.

Runs only after Hydra raised. Each override is looked at alone, then the right ones are composed and checked.
"""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config.check import ConfigErrors, check
from ddp_train.config.command_line import is_bare, whole, without_override
from ddp_train.config.composition import loader_of, parse
from ddp_train.config.schema import NAMED, SECTIONS, TARGETS
from ddp_train.config.spelling import CALLED_HERE, nearest, override, removal
from ddp_train.config.target import look_up, takes
from ddp_train.config.tree import nodes
from ddp_train.errors import ConfigError

_PLUGINS = {("hydra/sweeper", "optuna"): "pip install 'ddp-train[optuna]'"}  # options that come with an extra
_OPEN = ("metrics", "callbacks", "cluster.env", "init_from_keys", "extra")  # sections that take any name


def explain_hydra_error(error: Exception, arguments: list[str], conf: Path) -> str:
    """Return what to show for an exception that Hydra raised: all problems of the command line, or else Hydra's own words."""
    try:
        found = _find_all(arguments, conf)
    except ConfigErrors as known:
        found = known.errors
    except Exception:  # then Hydra's own words must do
        found = []
    if not found:
        said = [str(error).strip()]
        if error.__cause__ is not None and str(error.__cause__) not in said[0]:
            said.append(str(error.__cause__).strip())
        found = [ConfigError(happened="\n".join(said))]
    return str(ConfigErrors(found))


def refuse_unknown_options(arguments: list[str]) -> None:
    """Raise for options that are neither Hydra's nor ours, or lack their value, before Hydra's parser shows its usage and leaves.

    Raises:
        ConfigErrors: with every such option.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    own = {text for action in parser._actions for text in action.option_strings}
    try:
        _, unknown = parser.parse_known_args([text for text in arguments if text != "--version"])
    except ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        options = next(action.choices for action in parser._actions if name in action.option_strings)
        expected = f"one of {', '.join(options)}" if options else f"{name}=VALUE"
        fix = f"{name}={next(iter(options)) if options else 'VALUE'}"
        raise ConfigErrors([ConfigError(key=name, happened=error.message, expected=expected, fix=fix)]) from None
    errors = []
    for text in [text for text in unknown if text.startswith("-")]:  # what follows such an option is not known to the parser either
        name, equals, _ = text.partition("=")
        close = next(iter(get_close_matches(name.lstrip("-"), [option.lstrip("-") for option in own], n=1, cutoff=0.75)), "")
        meant = shlex.quote(text.lstrip("-")) if equals and not close else f"did you mean --{close}{text[len(name) :]}?" if close else ""
        expected = "key=value without dashes, or an option of ddp-train --help"
        errors.append(ConfigError(happened=f"{name} is no option", expected=expected, fix=meant or "ddp-train --help"))
    if errors:
        raise ConfigErrors(errors)


def options_first(arguments: list[str]) -> list[str]:
    """Put options, with their values, before overrides: Hydra's parser takes no override after an option that follows one."""
    options, overrides = [], []
    rest = list(arguments)
    while rest:
        text, *rest = rest
        if not text.startswith("-") or text[1:2].isdigit() or text[1:2] == ".":  # a number, cut off its key
            overrides.append(text)
            continue
        options.append(text)
        action = next((each for each in get_args_parser()._actions if any(name.startswith(text) for name in each.option_strings)), None)
        if action is None or action.nargs == 0:
            continue
        if action.nargs == "?":
            is_given = bool(rest) and rest[0] in (action.choices or ())
            options.append(rest.pop(0) if is_given else str(action.const))
        elif rest:
            options.append(rest.pop(0))
        else:
            return arguments  # nothing behind it, which is refused
    return [*options, *overrides]


def refuse_unknown(overrides: list[str], saved: Mapping[str, Any]) -> None:
    """Raise for an override that does not name a key of a saved config.

    Raises:
        ConfigErrors: with every such override.
    """
    values = dict(nodes(saved))
    meant, errors = whole(overrides)
    errors += without_override(meant, values, {})
    for text in meant:
        key, equals, value = text.partition("=")
        if text.startswith("~"):
            kept = "single values: a run that is resumed keeps its components"
            errors.append(ConfigError(key=key[1:], happened="would be removed", expected=kept, fix="leave it out"))
        elif equals and key not in values:
            errors.append(_unknown(key, value, [*values]))
        elif equals and isinstance(values[key], Mapping):
            errors.append(ConfigError(key=key, happened="is a group", expected="single keys: a run that is resumed keeps its components"))
    if errors:
        raise ConfigErrors(errors)


def values_of(overrides: Sequence[str]) -> DictConfig:
    """Return the values that overrides give to a saved config.

    Raises:
        ConfigErrors: with every one that cannot be read.
    """
    errors = []
    for text in overrides:
        try:
            OmegaConf.create(OmegaConf.from_dotlist([text]))
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            errors.append(_unreadable(text, error))
    if errors:
        raise ConfigErrors(errors)
    return OmegaConf.from_dotlist([*overrides])


def _find_all(arguments: list[str], conf: Path) -> list[ConfigError]:
    args = parse(arguments)
    loader = loader_of(args, conf)
    require_config(args, loader)

    def compose(overrides: list[str]) -> DictConfig:
        return loader.load_configuration(args.config_name or "config", overrides, run_mode=RunMode.RUN)

    parser = OverridesParser.create(loader)
    words, errors = whole(args.overrides)
    choices: list[Override] = []
    values: list[Override] = []
    lists: list[str] = []
    for text in words:
        try:
            override_ = parser.parse_override(text)
        except HydraException as error:
            if "=" in text or text.startswith("~"):
                errors.append(_unreadable(text, error))
            continue
        if override_.is_delete() and override_.key_or_group in NAMED:
            lists.append(override_.key_or_group)
        elif offered := loader.get_group_options(override_.key_or_group):
            wrong = [] if override_.is_delete() else [*_wrong_options(override_, offered)]
            errors += wrong
            if not wrong:
                choices.append(override_)
        else:
            values.append(override_)
    lists = [group for group in lists if not any(each.key_or_group == group and isinstance(each.value(), str) for each in choices)]
    replacing = [_one(each) for each in choices if not each.is_add()]
    composed = compose(replacing)
    chosen, again = _without_second_choice(choices, composed.hydra.runtime.choices)
    errors += again
    composed = composed if chosen == replacing else compose(chosen)
    base = _plain(composed)
    known = dict(nodes(base))
    groups = loader.get_group_options("", results_filter=None)
    offered_by = {group: offered for group in groups if (offered := loader.get_group_options(group))} if any(map(is_bare, words)) else {}
    errors += without_override(words, known, offered_by)
    good: list[str] = []
    there = dict(known)  # as far as the overrides before have left it
    unknown: list[Override] = []
    found: list[ConfigError] = []
    for each in values:
        key = each.key_or_group
        if each.is_delete():
            is_known = any(name == key or name.startswith(f"{key}.") for name in there)
        else:
            is_known = each.is_add() or each.is_force_add() or key in known
        is_below_added = any(other.is_add() and key.startswith(f"{other.key_or_group}.") for other in values)
        if not is_known and not is_below_added:
            unknown.append(each)
        elif problem := _wrong_sign(each, there):
            errors.append(problem)
        else:
            good.append(_one(each))
            is_gone = each.is_delete()
            there = {name: value for name, value in there.items() if not (is_gone and (name == key or name.startswith(f"{key}.")))}
            there |= {} if is_gone else {key: each.value()}
    try:
        composed = compose([*chosen, *good]) if good else composed
        with read_write(composed), open_dict(composed):
            hydra_node = composed.pop("hydra")
        base = _plain(composed)
        check(composed, hydra=hydra_node)
    except ConfigErrors as error:
        found = error.errors
    except (HydraException, OmegaConfBaseException):
        if not errors and not unknown and not lists:
            raise  # else it is a consequence of what was found above, as a rule
    errors += [_removed_whole(group, base.get(group) or ()) for group in lists]
    return [*errors, *(_not_there(each, base, [*known, *groups]) for each in unknown), *found]


def require_config(args: Any, loader: ConfigLoaderImpl) -> None:
    """Refuse a folder or a root config that is not there.

    Raises:
        ConfigErrors: naming it, with those that are.
    """
    if args.config_dir is not None and not os.path.isdir(args.config_dir):
        happened, expected = f"there is no folder {os.path.abspath(args.config_dir)}", "a folder with YAML in folders named after groups"
        raise ConfigErrors([ConfigError(key="--config-dir", happened=happened, expected=expected)])
    if args.config_name is not None and not loader.repository.config_exists(args.config_name):
        options = loader.get_group_options("", results_filter=ObjectType.CONFIG)
        names = [name for name in options if not name.startswith("_")]  # those are Hydra's
        close = nearest(args.config_name, names)
        fix = f"did you mean --config-name={close}?" if close else "--config-name=config"
        if args.config_name in loader.get_group_options("experiment"):
            fix = f"experiment={args.config_name}"
        happened = f"there is no {args.config_name}.yaml for the root of the configuration"
        raise ConfigErrors([ConfigError(key="--config-name", happened=happened, expected=f"one of {', '.join(names)}", fix=fix)])


def _plain(composed: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    return {str(key): value for key, value in plain.items()}


def _unreadable(text: str, error: Exception) -> ConfigError:
    """Say what to do about a value that Hydra's parser cannot read: most often a text that needs quotes."""
    key, _, value = text.partition("=")
    open_ = _closing(value)
    if not key.lstrip("+~"):
        return ConfigError(happened=f"{text!r} has no key", expected="key=value, group=option, +key=value or ~key", fix="ddp-train --help")
    happened = f"{value!r} cannot be read" if value else str(error).splitlines()[0]
    fix = shlex.quote(f"{key}={value}{open_}") if open_ else override(key, value)
    expected = "as many brackets closed as opened" if open_ else "quotes around text with blanks or brackets, and the shell's around them"
    return ConfigError(key=key.lstrip("+~"), happened=happened, expected=expected, fix=fix)


def _closing(value: str) -> str:
    """Return the brackets that are left to close, in their order; "" where others are wrong too."""
    closing, open_ = {"[": "]", "{": "}", "(": ")"}, ""
    for char in value:
        if char in closing:
            open_ = closing[char] + open_
        elif char in closing.values():
            if not open_.startswith(char):
                return ""
            open_ = open_[1:]
    return open_


def _wrong_options(chosen: Override, options: list[str]) -> Iterator[ConfigError]:
    value = chosen.value()
    values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    group = chosen.key_or_group
    for choice in map(str, values):
        if choice in options or choice in ("null", "None"):
            continue
        close = nearest(choice, options)
        fix = _PLUGINS.get((group, choice), f"did you mean {group}={close}?" if close else "")
        yield ConfigError(key=group, happened=f"has no option {choice!r}", expected=f"one of {', '.join(options)}", fix=fix)


def _without_second_choice(choices: Sequence[Override], defaults: Mapping[str, Any]) -> tuple[list[str], list[ConfigError]]:
    """Return the choices of groups as they were meant, and an error for each that adds a group which is among the defaults already."""
    meant, errors = [], []
    for each in choices:
        text, key = _one(each), each.key_or_group + (f"@{each.package}" if each.package else "")
        if each.is_add() and key in defaults:
            text = text.lstrip("+")
            fix = shlex.quote(str(each.input_line).lstrip("+"))
            errors.append(ConfigError(key=key, happened="is in the configuration already", expected="no + before it", fix=fix))
        meant.append(text)
    return meant, errors


def _removed_whole(group: str, names: Iterable[str]) -> ConfigError:
    """Say how to remove what several options of one group have put there: Hydra removes a group only where one option is chosen."""
    fix = " ".join(removal(f"{group}.{name}", {}) for name in names)
    return ConfigError(key=group, happened="is not removed as a whole", expected="the names in it, one by one", fix=fix or "leave it out")


def _wrong_sign(given: Override, known: Mapping[str, Any]) -> ConfigError | None:
    """Refuse to add what is there, and to remove what Hydra does not find."""
    key, text = given.key_or_group, str(given.input_line)
    if given.is_delete() and key in known and known[key] is None:
        return ConfigError(
            key=key, happened="is null, and Hydra does not remove that", expected="another value first", fix=removal(key, None)
        )
    if given.is_add() and known.get(key) is not None and not isinstance(given.value(), (dict, list)):
        return ConfigError(
            key=key, happened="is in the configuration already", expected="no + before it", fix=shlex.quote(text.lstrip("+"))
        )
    return None


def _not_there(given: Override, tree: Mapping[str, Any], valid: list[str]) -> ConfigError:
    """Say what to type for a key that the configuration does not have: `+` where something would read it, else the nearest one."""
    key, value = given.key_or_group, str(given.input_line).partition("=")[2]
    if given.is_delete():
        close = nearest(key, [name for name in valid if name.startswith("hydra") == key.startswith("hydra")])  # ours are below hydra too
        fix = shlex.quote(f"~{close}") if close and close != key else "leave it out"
        return ConfigError(key=key, happened="is not a key of this configuration", expected="one that is there to be removed", fix=fix)
    close, reader = nearest(key, valid), _reader(key, tree)
    if reader:
        return ConfigError(
            key=key,
            happened=f"is not in the YAML of this option, but {reader} takes it",
            expected="a + before what is added" + (f", or the key {close}" if close else ""),
            fix=shlex.quote(f"+{key}={value}"),
        )
    if (root := key.partition(".")[0]) in CALLED_HERE:
        return ConfigError(key=key, happened="is not a key of this configuration", expected=CALLED_HERE[root], fix="leave it out")
    if not close and "." not in key:
        return ConfigError(
            key=key,
            happened="is not a key of this configuration",
            expected=f"one of {', '.join(name for name in valid if '.' not in name)}; values of your own stand below extra",
            fix=shlex.quote(f"+extra.{key}={value}"),
        )
    return _unknown(key, value, valid)


def _reader(key: str, tree: Mapping[str, Any]) -> str:
    """Return what would read a new key: a class whose signature takes it, or a section that takes any name; "" for nothing."""
    if any(key.startswith(f"{section}.") for section in _OPEN):
        return key.partition(".")[0]
    known = dict(nodes(tree))
    owner, _, name = key.rpartition(".")
    inner = name
    while owner:
        node = known.get(owner)
        if owner == "data.eval" and isinstance(tree.get("data"), Mapping):
            node = {**tree["data"], **(node or {})}
        if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
            try:
                is_taken = takes(look_up(node["_target_"]), inner)
            except Exception:  # which the check says of it
                is_taken = False
            return node["_target_"] if is_taken or inner != name else ""
        owner, _, inner = owner.rpartition(".")
        if owner == "" and inner in (*SECTIONS, *TARGETS):
            return ""
    return ""


def _unknown(key: str, value: str, valid: list[str]) -> ConfigError:
    close, section = nearest(key, valid), key.rpartition(".")[0]
    beside = [name for name in valid if section and name.rpartition(".")[0] == section]
    return ConfigError(
        key=key,
        happened="is not a key of this configuration",
        expected="" if close or not beside else f"one of {', '.join(beside)}",
        fix=f"did you mean {shlex.quote(f'{close}={value}')}?" if close else "leave it out",
    )


def _one(given: Override) -> str:
    """Return the override as text, a sweep as its first value."""
    if not given.is_sweep_override():
        return str(given.input_line)
    first: Any = next(iter(given.sweep_string_iterator()))
    return f"{given.get_key_element()}={first}"
