"""Explain a command line that Hydra refuses: with every mistake in it, not only the first one that Hydra met.

Runs only after Hydra raised. Words that cannot be read and options that do not exist are named here. All others are composed again, keys
that do not exist too, and `check` says what is wrong with them, as with those in a YAML.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from ddp_train.config.check import ConfigErrors, check
from ddp_train.config.command.command_line import is_bare, unreadable, whole, without_override
from ddp_train.config.command.composition import loader_of, parse
from ddp_train.config.command.options import require_config
from ddp_train.config.rules.unknown_names import unknown
from ddp_train.config.schema import NAMED
from ddp_train.config.spelling import nearest, removal
from ddp_train.config.tree import at, nodes
from ddp_train.errors import ConfigError

_PLUGINS = {("hydra/sweeper", "optuna"): "pip install 'ddp-train[optuna]'"}  # options that come with an extra
_MEANT = {("compile", "True"): "default", ("compile", "False"): "off"}  # what a switch would be called
_IS_THERE = {"happened": "is in the configuration already", "expected": "no + before it"}


def explain_hydra_error(error: Exception, arguments: list[str], conf: Path) -> str:
    """Return what to show for an exception that Hydra raised: all problems of the command line, or else Hydra's own words."""
    try:
        found = [_unreadable_yaml(error)] if isinstance(error, YAMLError) else _find_all(arguments, conf)
    except ConfigErrors as known:
        found = known.errors
    except Exception:  # then Hydra's own words must do
        found = []
    cause = "" if error.__cause__ is None or str(error.__cause__) in str(error) else f"\n{str(error.__cause__).strip()}"
    return str(ConfigErrors(found or [ConfigError(happened=str(error).strip() + cause)]))


def is_of_composing(error: Exception) -> bool:
    """Tell whether an exception is of Hydra, of OmegaConf or of the YAML parser. They also raise plain ones, such as ValueError."""
    raised_in = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)) or raised_in[-1:] in (["hydra"], ["omegaconf"])


def _unreadable_yaml(error: YAMLError) -> ConfigError:
    mark = isinstance(error, MarkedYAMLError) and (error.context_mark or error.problem_mark)  # where what is wrong begins, or is found
    if not isinstance(error, MarkedYAMLError) or not mark:
        return ConfigError(happened=str(error), expected="a YAML file", fix="correct this file")
    path = Path(mark.name)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    happened = f"is no YAML: {error.problem}"
    expected = "plain YAML: numbers, texts, lists and groups of keys"
    fix = "correct this line; a text with special characters stands in quotes"
    return ConfigError(key=f"{shown}, line {mark.line + 1}, column {mark.column + 1}", happened=happened, expected=expected, fix=fix)


def _find_all(arguments: list[str], conf: Path) -> list[ConfigError]:
    args = parse(arguments)
    loader = loader_of(args, conf)
    require_config(args, loader)

    def compose(overrides: list[str]) -> tuple[DictConfig, DictConfig]:
        composed = loader.load_configuration(args.config_name or "config", overrides, run_mode=RunMode.RUN)
        with read_write(composed), open_dict(composed):
            return composed.copy(), composed.pop("hydra")

    words, errors = whole(args.overrides)
    typed = _sort(words, loader)
    replacing = [_first_job(choice) for choice in typed.choices if not choice.is_add()]
    composed, hydra_node = compose(replacing)
    chosen, again = _without_second_choice(typed.choices, hydra_node.runtime.choices)
    base = _plain(composed if chosen == replacing else compose(chosen)[0])
    known = dict(nodes(base))
    groups = loader.get_group_options("", results_filter=None) if any(map(is_bare, words)) else []
    offered_by = {group: offered for group in groups if (offered := loader.get_group_options(group))}
    errors += [*typed.errors, *again, *without_override(words, known, offered_by)]
    values, absent, wrong = _look_up(typed.values, known)
    errors += wrong
    found: list[ConfigError] = []
    try:
        composed, hydra_node = compose([*chosen, *values])
        base = _plain(composed)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        check(composed, hydra=hydra_node)
    except ConfigErrors as error:
        found = error.errors
    except (HydraException, OmegaConfBaseException):
        if not errors and not absent and not typed.lists:
            raise  # else it is a consequence of what was found above, as a rule
        found = [unknown(key, known, value) for key, value in absent.items()]
    errors += [_removed_whole(group, base.get(group) or ()) for group in typed.lists]
    return [*errors, *_to_be_added(absent, base, found), *found]


def _to_be_added(absent: Mapping[str, Any], tree: Mapping[str, Any], errors: Sequence[ConfigError]) -> Iterator[ConfigError]:
    """Yield an error for each key that is read and was typed without a +; for others say that it was typed, and not in a YAML."""
    for error in errors:
        if error.key in absent and error.fix.startswith(("remove it: ", "leave it out: ")):
            error.fix = "leave it out"
    wrong = {error.key for error in errors}
    for key, value in absent.items():
        if not any(f"{key}.".startswith(f"{name}.") for name in wrong):
            owner = at(tree, key.rpartition(".")[0])
            reader = owner.get("_target_") if isinstance(owner, Mapping) else None
            happened = f"is not in the YAML of this option, but {reader or key.partition('.')[0]} takes it"
            yield ConfigError(key=key, happened=happened, expected="a + before what is added", fix=shlex.quote(f"+{key}={value}"))


@dataclass
class _Typed:
    """The words of a command line by what they are for, in their order."""

    choices: list[Override] = field(default_factory=list)  # of a group's option
    values: list[Override] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)  # groups of several options that are removed as a whole
    errors: list[ConfigError] = field(default_factory=list)


def _sort(words: Iterable[str], loader: ConfigLoader) -> _Typed:
    """Tell choices from values, and refuse what cannot be read and options that a group does not have."""
    parser, typed = OverridesParser.create(loader), _Typed()
    for text in words:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            typed.errors += [] if is_bare(text) else [unreadable(text, error)]
            continue
        if override.is_delete() and override.key_or_group in NAMED:
            typed.lists.append(override.key_or_group)
        elif offered := loader.get_group_options(override.key_or_group):
            wrong = [] if override.is_delete() else [*_wrong_options(override, offered)]
            typed.errors += wrong
            typed.choices += [] if wrong else [override]
        else:
            typed.values.append(override)
    chosen = {choice.key_or_group for choice in typed.choices if isinstance(choice.value(), str)}
    typed.lists = [group for group in typed.lists if group not in chosen]
    return typed


def _look_up(values: Sequence[Override], known: Mapping[str, Any]) -> tuple[list[str], dict[str, str], list[ConfigError]]:
    """Look for each key in the configuration, as far as the overrides before have left it.

    Returns:
        Overrides to compose from: keys that are not there are added, so that `check` says what is wrong with them.
        The keys that are not there, with their values.
        What is wrong with removing, and with adding what is there.
    """
    texts, absent, errors, there = list[str](), dict[str, str](), list[ConfigError](), dict(known)
    added = [override.key_or_group for override in values if override.is_add()]
    for override in values:
        key, text = override.key_or_group, str(override.input_line)
        is_new = override.is_add() or override.is_force_add() or any(key.startswith(f"{other}.") for other in added)
        if override.is_delete():
            below = [name for name in there if name == key or name.startswith(f"{key}.")]
            if not below:
                errors.append(_not_removed(key, there))
            elif there.get(key, 0) is None:
                expected, fix = "another value first", removal(key, None)
                errors.append(ConfigError(key=key, happened="is null, and Hydra does not remove that", expected=expected, fix=fix))
            else:
                texts.append(text)
                there = {name: value for name, value in there.items() if name not in below}
            continue
        if override.is_add() and there.get(key) is not None and not isinstance(override.value(), (dict, list)):
            errors.append(ConfigError(key=key, fix=shlex.quote(text.lstrip("+")), **_IS_THERE))
            continue
        if not is_new and key not in known:
            absent[key] = text.partition("=")[2]
        texts.append(("++" if key in absent else "") + _first_job(override))
        there[key] = override.value()
    return texts, absent, errors


def _not_removed(key: str, known: Iterable[str]) -> ConfigError:
    close = nearest(key, [name for name in known if name.startswith("hydra") == key.startswith("hydra")])  # ours are below hydra too
    fix = shlex.quote(f"~{close}") if close and close != key else "leave it out"
    return ConfigError(key=key, happened="is not a key of this configuration", expected="one that is there to be removed", fix=fix)


def _plain(composed: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    return {str(key): value for key, value in plain.items()}


def _wrong_options(chosen: Override, options: list[str]) -> Iterator[ConfigError]:
    value = chosen.value()
    values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    group = chosen.key_or_group
    for choice in map(str, values):
        if choice in options or choice in ("null", "None"):
            continue
        close = _MEANT.get((group, choice)) or nearest(choice, options)
        fix = _PLUGINS.get((group, choice), f"did you mean {group}={close}?" if close else "")
        yield ConfigError(key=group, happened=f"has no option {choice!r}", expected=f"one of {', '.join(options)}", fix=fix)


def _without_second_choice(choices: Sequence[Override], defaults: Mapping[str, Any]) -> tuple[list[str], list[ConfigError]]:
    """Return the choices of groups as they were meant, and an error for each that adds a group which is among the defaults already."""
    meant, errors = [], []
    for choice in choices:
        text, key = _first_job(choice), choice.key_or_group + (f"@{choice.package}" if choice.package else "")
        if choice.is_add() and key in defaults:
            text = text.lstrip("+")
            errors.append(ConfigError(key=key, fix=shlex.quote(str(choice.input_line).lstrip("+")), **_IS_THERE))
        meant.append(text)
    return meant, errors


def _removed_whole(group: str, names: Iterable[str]) -> ConfigError:
    """Say how to remove what several options of one group have put there: Hydra removes a group only where one option is chosen."""
    fix = " ".join(removal(f"{group}.{name}", {}) for name in names)
    return ConfigError(key=group, happened="is not removed as a whole", expected="the names in it, one by one", fix=fix or "leave it out")


def _first_job(override: Override) -> str:
    """Return an override as text, a sweep as its first value."""
    if not override.is_sweep_override():
        return str(override.input_line)
    first: Any = next(iter(override.sweep_string_iterator()))
    return f"{override.get_key_element()}={first}"
