"""Explain a command line that Hydra refuses: with every mistake in it, not only the first one that Hydra met.

Runs only after Hydra raised. Words that cannot be read and options that do not exist are named here. The other options are composed again,
all values are put into that, keys that do not exist too, and `check_config` says what is wrong. Where nothing is (a + before what
is there, a ~ before what is not), Hydra's own words are shown.
"""

import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
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

from ddp_train.config.check import check_config
from ddp_train.config.command.command_line import is_bare, join_cut_words, require_config, unreadable, without_override
from ddp_train.config.command.composition import loader_of, parse, shown
from ddp_train.config.spelling import instead_of, nearest
from ddp_train.config.tree import dotted_items, value_at
from ddp_train.errors import ConfigError, ConfigErrors

_PLUGINS = {("hydra/sweeper", "optuna"): "pip install 'ddp-train[optuna]'"}  # options that come with an extra


def explain_hydra_error(error: Exception, arguments: list[str], conf: Path) -> str:
    """Return the message for an exception that Hydra raised: all problems of the command line, or else Hydra's own words."""
    try:
        problems = [_unreadable_yaml(error)] if isinstance(error, YAMLError) else _find_all(arguments, conf)
    except ConfigErrors as known:
        problems = known.errors
    except Exception:  # then Hydra's own words must do
        problems = []
    cause = "" if error.__cause__ is None or str(error.__cause__) in str(error) else f"\n{str(error.__cause__).strip()}"
    return str(ConfigErrors(problems or [ConfigError(happened=str(error).strip() + cause)]))


def is_of_composing(error: Exception) -> bool:
    """Tell whether an exception is of Hydra, of OmegaConf or of the YAML parser. They also raise plain ones, such as ValueError."""
    raised_in = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)) or raised_in[-1:] in (["hydra"], ["omegaconf"])


def _unreadable_yaml(error: YAMLError) -> ConfigError:
    mark = isinstance(error, MarkedYAMLError) and (error.context_mark or error.problem_mark)  # where what is wrong begins, or is found
    if not isinstance(error, MarkedYAMLError) or not mark:
        return ConfigError(happened=str(error), expected="a YAML file", fix="correct this file")
    key = f"{shown(Path(mark.name))}, line {mark.line + 1}, column {mark.column + 1}"
    expected, fix = "plain YAML: numbers, texts, lists and groups of keys", "correct this line; special characters need quotes"
    return ConfigError(key=key, happened=f"is not valid YAML: {error.problem}", expected=expected, fix=fix)


def _find_all(arguments: list[str], conf: Path) -> list[ConfigError]:
    args = parse(arguments)
    loader = loader_of(args, conf)
    require_config(args, loader)
    compose = partial(loader.load_configuration, args.config_name or "config", run_mode=RunMode.RUN)
    words, errors = join_cut_words(args.overrides)
    choices, values, wrong = _sort(words, loader)
    if added := [text for text in choices if text.startswith("+")]:
        defaults = compose([]).hydra.runtime.choices
        for text in (text for text in added if (key := text[1:].partition("=")[0]) in defaults):
            happened, expected = "is in the configuration already", "no + before it"
            errors.append(ConfigError(key=key, happened=happened, expected=expected, fix=shlex.quote(text[1:])))
            choices[choices.index(text)] = text[1:]
    composed = compose(choices)
    known = dict(dotted_items(_plain(composed)))
    groups = loader.get_group_options("", results_filter=None) if any(map(is_bare, words)) else []
    offered_by = {group: offered for group in groups if (offered := loader.get_group_options(group))}
    errors += [*wrong, *without_override(words, known, offered_by)]
    new = tuple(f"{override.key_or_group}." for override in values if override.is_add() or override.is_force_add())
    absent = {override.key_or_group: override for override in values if not f"{override.key_or_group}.".startswith(new)}
    absent = {key: override for key, override in absent.items() if key not in known and not override.is_delete()}
    try:
        check_config(composed, hydra=_apply(values, composed))
    except ConfigErrors as error:
        return [*errors, *_to_be_added(absent, _plain(composed), error.errors), *error.errors]
    return [*errors, *_to_be_added(absent, _plain(composed), [])]


def _apply(values: Iterable[Override], composed: DictConfig) -> DictConfig:
    """Put values into a configuration, also new keys, and take its section `hydra` out: composing again would take as long."""
    with read_write(composed), open_dict(composed), read_write(composed.hydra), open_dict(composed.hydra):
        for override in values:
            parent, _, name = override.key_or_group.rpartition(".")
            if not override.is_delete():
                first = OverridesParser.create().parse_override(_first_job(override))
                OmegaConf.update(composed, override.key_or_group, first.value(), force_add=True)
            elif isinstance(section := OmegaConf.select(composed, parent) if parent else composed, DictConfig):
                section.pop(name, None)
            composed.hydra.overrides.task.append(str(override.input_line))
        hydra: DictConfig = composed.pop("hydra")
    return hydra


def _to_be_added(absent: Mapping[str, Override], tree: Mapping[str, Any], errors: Sequence[ConfigError]) -> Iterator[ConfigError]:
    """Yield an error for each key that is read and was typed without a +; for others say that it was typed, and not in a YAML."""
    for error in errors:
        if error.key in absent and error.fix.startswith(("remove it: ", "leave it out: ")):
            error.fix = "leave it out"
    wrong = {error.key for error in errors}
    for key, override in absent.items():
        if not any(f"{key}.".startswith(f"{name}.") for name in wrong):
            owner = value_at(tree, key.rpartition(".")[0])
            reader = owner.get("_target_") if isinstance(owner, Mapping) else None
            happened = f"is not in the YAML of this option, but {reader or key.partition('.')[0]} takes it"
            yield ConfigError(key=key, happened=happened, expected="a + before an added key", fix=shlex.quote(f"+{override.input_line}"))


def _sort(words: Iterable[str], loader: ConfigLoader) -> tuple[list[str], list[Override], list[ConfigError]]:
    """Tell choices of a group's option from values, and name what cannot be read and options that a group does not have."""
    parser, choices, values, errors = OverridesParser.create(loader), list[str](), list[Override](), list[ConfigError]()
    for text in words:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            errors += [] if is_bare(text) else [unreadable(text, error)]
            continue
        if offered := loader.get_group_options(override.key_or_group):
            wrong = [] if override.is_delete() else [*_wrong_options(override, offered)]
            errors += wrong
            choices += [] if wrong else [_first_job(override)]
        else:
            values.append(override)
    return choices, values, errors


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
        close = instead_of(group, choice) or (f"{group}={near}" if (near := nearest(choice, options)) else "")
        fix = _PLUGINS.get((group, choice), f"did you mean {close}?" if close else "")
        yield ConfigError(key=group, happened=f"has no option {choice!r}", expected=f"one of {', '.join(options)}", fix=fix)


def _first_job(override: Override) -> str:
    """Return an override as text, a sweep as its first value."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
