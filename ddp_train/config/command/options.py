"""The options of a command line, which begin with dashes and are Hydra's, and the YAML that they name.

A project's own YAML is found without flags: pyproject.toml, in the folder where one stands, says where it lies.

    [tool.ddp_train]
    conf = "conf"

Relative paths of a run mean the folder where one stands, and so does this: no folder above it is looked at.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from argparse import ArgumentError
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from omegaconf import DictConfig

from ddp_train.config.check import CONF, ConfigErrors
from ddp_train.config.hydra_internals import ConfigLoaderImpl, get_args_parser
from ddp_train.config.spelling import nearest
from ddp_train.config.tree import texts
from ddp_train.errors import ConfigError

_PYPROJECT = "pyproject.toml"


def refuse_unknown_options(arguments: list[str]) -> None:
    """Raise for options that are neither Hydra's nor ours, or lack their value, before Hydra's parser shows its usage and leaves."""
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
    """Refuse a folder or a root config that is not there."""
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


def options_of(hydra: DictConfig) -> list[str]:
    """Return what a command line needs, apart from its overrides, to find the same YAML again."""
    here = Path.cwd()
    sources = hydra.runtime.config_sources
    added = [Path(source.path) for source in sources if source.provider == "command-line" and not is_found(Path(source.path))]
    instead = [source.path for source in sources if source.provider == "main" and Path(source.path) != CONF]
    found = [f"--config-path={path}" for path in instead]  # whole: Hydra takes a relative one for a module of ours
    found += [f"--config-dir={folder.relative_to(here) if folder.is_relative_to(here) else folder}" for folder in added]
    found += [f"--config-name={hydra.job.config_name}"] if hydra.job.config_name not in (None, "config") else []
    return found + [text for text in texts(hydra.overrides.hydra) if text.lstrip("+").startswith("hydra.searchpath=")]


def with_conf(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the project's YAML as if `--config-dir` were typed; one that is typed counts instead.

    Raises:
        ConfigError: pyproject.toml cannot be read, or says something else than an existing folder.
    """
    is_typed = any(word == "-cd" or word.startswith(("--config-dir", "-cd=")) for word in words)
    folder = None if is_typed else _conf_folder()
    return [*words] if folder is None else [f"--config-dir={folder}", *words]


def is_found(folder: Path) -> bool:
    """Tell whether commands find a folder of YAML without being told."""
    try:
        found = _conf_folder()
    except ConfigError:  # of no matter where another one was typed
        return False
    return found is not None and folder == Path(found).absolute()


def _conf_folder() -> str | None:
    """Return the folder that pyproject.toml names, as it stands there; None: there is no such file, or it names none."""
    try:
        content: Any = tomllib.loads(Path(_PYPROJECT).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(key=_PYPROJECT, happened=f"cannot be read: {error}", fix="mend it, or --config-dir=FOLDER") from None
    table = content.get("tool", {}).get("ddp_train")
    if table is None:
        return None
    if [*table] != ["conf"] or not isinstance(table["conf"], str):
        wrong = next((name for name in table if name != "conf"), "conf")
        happened = f"has {wrong!r}" if wrong in table and wrong != "conf" else f"has conf = {table.get('conf')!r}"
        expected = "one key, conf: the folder with YAML in folders named after groups"
        raise ConfigError(key=f"{_PYPROJECT}: tool.ddp_train", happened=happened, expected=expected, fix='conf = "conf"')
    folder = str(table["conf"])
    if not Path(folder).is_dir():
        happened = f"names {folder!r}, and there is no such folder here"
        raise ConfigError(key=f"{_PYPROJECT}: tool.ddp_train.conf", happened=happened, fix=f"mkdir {folder}")
    return folder
