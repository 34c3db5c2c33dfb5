"""Find every mistake of a command line that Hydra refuses, not only the first one that it met.

Runs only after Hydra raised. Each override is looked at alone, then the right ones are composed and checked.
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
from ddp_train.config.command.command_line import is_bare, whole, without_override
from ddp_train.config.command.composition import loader_of, parse
from ddp_train.config.command.mistyped import not_there, unreadable
from ddp_train.config.command.typed_options import require_config
from ddp_train.config.schema import NAMED
from ddp_train.config.spelling import nearest, removal
from ddp_train.config.tree import nodes
from ddp_train.errors import ConfigError

_PLUGINS = {("hydra/sweeper", "optuna"): "pip install 'ddp-train[optuna]'"}  # options that come with an extra

_MEANT = {("compile", "True"): "default", ("compile", "False"): "off"}  # what a switch would be called


def explain_hydra_error(error: Exception, arguments: list[str], conf: Path) -> str:
    """Return what to show for an exception that Hydra raised: all problems of the command line, or else Hydra's own words."""
    try:
        found = [_unreadable_yaml(error)] if isinstance(error, YAMLError) else _find_all(arguments, conf)
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
    return ConfigError(
        key=f"{shown}, line {mark.line + 1}, column {mark.column + 1}",
        happened=f"is no YAML: {error.problem}",
        expected="plain YAML: numbers, texts, lists and groups of keys",
        fix="correct this line; a text with special characters stands in quotes",
    )


def _find_all(arguments: list[str], conf: Path) -> list[ConfigError]:
    args = parse(arguments)
    loader = loader_of(args, conf)
    require_config(args, loader)

    def compose(overrides: list[str]) -> DictConfig:
        return loader.load_configuration(args.config_name or "config", overrides, run_mode=RunMode.RUN)

    words, errors = whole(args.overrides)
    given = _sort(words, loader)
    replacing = [_one(each) for each in given.choices if not each.is_add()]
    composed = compose(replacing)
    chosen, again = _without_second_choice(given.choices, composed.hydra.runtime.choices)
    composed = composed if chosen == replacing else compose(chosen)
    base = _plain(composed)
    known = dict(nodes(base))
    groups = loader.get_group_options("", results_filter=None)
    offered_by = {group: offered for group in groups if (offered := loader.get_group_options(group))} if any(map(is_bare, words)) else {}
    values = _look_up(given.values, known)
    errors += [*given.errors, *again, *without_override(words, known, offered_by), *values.errors]
    found: list[ConfigError] = []
    try:
        composed = compose([*chosen, *values.good]) if values.good else composed
        with read_write(composed), open_dict(composed):
            hydra_node = composed.pop("hydra")
        base = _plain(composed)
        check(composed, hydra=hydra_node)
    except ConfigErrors as error:
        found = error.errors
    except (HydraException, OmegaConfBaseException):
        if not errors and not values.unknown and not given.lists:
            raise  # else it is a consequence of what was found above, as a rule
    errors += [_removed_whole(group, base.get(group) or ()) for group in given.lists]
    return [*errors, *(not_there(each, base, [*known, *groups]) for each in values.unknown), *found]


@dataclass
class _Given:
    """The words of a command line by what they are for, in their order."""

    choices: list[Override] = field(default_factory=list)  # of a group's option
    values: list[Override] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)  # groups of several options that are removed as a whole
    errors: list[ConfigError] = field(default_factory=list)


def _sort(words: Iterable[str], loader: ConfigLoader) -> _Given:
    """Tell choices from values, and refuse what cannot be read and options that a group does not have."""
    parser, given = OverridesParser.create(loader), _Given()
    for text in words:
        try:
            override_ = parser.parse_override(text)
        except HydraException as error:
            if "=" in text or text.startswith("~"):
                given.errors.append(unreadable(text, error))
            continue
        if override_.is_delete() and override_.key_or_group in NAMED:
            given.lists.append(override_.key_or_group)
        elif offered := loader.get_group_options(override_.key_or_group):
            wrong = [] if override_.is_delete() else [*_wrong_options(override_, offered)]
            given.errors += wrong
            given.choices += [] if wrong else [override_]
        else:
            given.values.append(override_)
    chosen = {each.key_or_group for each in given.choices if isinstance(each.value(), str)}
    given.lists = [group for group in given.lists if group not in chosen]
    return given


@dataclass
class _Values:
    """Overrides of values by what is wrong with them."""

    good: list[str] = field(default_factory=list)
    unknown: list[Override] = field(default_factory=list)  # their keys are not in the configuration
    errors: list[ConfigError] = field(default_factory=list)


def _look_up(values: Sequence[Override], known: Mapping[str, Any]) -> _Values:
    """Look for each key in the configuration, as far as the overrides before have left it."""
    found, there = _Values(), dict(known)
    for each in values:
        key = each.key_or_group
        below = [name for name in there if name == key or name.startswith(f"{key}.")] if each.is_delete() else []
        is_known = bool(below) if each.is_delete() else each.is_add() or each.is_force_add() or key in known
        is_below_added = any(other.is_add() and key.startswith(f"{other.key_or_group}.") for other in values)
        if not is_known and not is_below_added:
            found.unknown.append(each)
        elif problem := _wrong_sign(each, there):
            found.errors.append(problem)
        else:
            found.good.append(_one(each))
            for name in below:
                del there[name]
            if not each.is_delete():
                there[key] = each.value()
    return found


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


def _one(given: Override) -> str:
    """Return the override as text, a sweep as its first value."""
    if not given.is_sweep_override():
        return str(given.input_line)
    first: Any = next(iter(given.sweep_string_iterator()))
    return f"{given.get_key_element()}={first}"
