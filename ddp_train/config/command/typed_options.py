"""The options of a command line, which begin with dashes and are Hydra's: in their place, known, and naming what is there."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentError
from difflib import get_close_matches
from typing import Any

from hydra.core.object_type import ObjectType

from ddp_train.config.check import ConfigErrors
from ddp_train.config.hydra_internals import ConfigLoaderImpl, get_args_parser
from ddp_train.config.spelling import nearest
from ddp_train.errors import ConfigError


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
