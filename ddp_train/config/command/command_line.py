"""The words of a command line: overrides, and options with dashes, which are Hydra's; what is neither, or holds a secret, is named.

A project's own YAML needs no option: pyproject.toml, in the folder where one stands (none above it), says where it lies.

    [tool.ddp_train]
    conf = "conf"
"""

import os
import shlex
import tomllib
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from omegaconf import DictConfig

from ddp_train import CONF
from ddp_train.config.check import plain_secret
from ddp_train.config.command.commands import COMMANDS
from ddp_train.config.hydra_internals import ConfigLoaderImpl, get_args_parser
from ddp_train.config.spelling import did_you_mean, instead_of, nearest, override
from ddp_train.config.tree import texts
from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.system import redaction

_PYPROJECT = "pyproject.toml"


def refuse_unsafe_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that hold a secret, before anything parses or shows them."""
    errors = []
    for text in dict.fromkeys([*overrides, *join_cut_words(overrides)[0]]):  # as they came, and as they were meant
        key, equals, value = text.partition("=")
        key, value = (key.lstrip("+~-").strip(), value.strip("'\" ")) if equals else ("", text)
        name = redaction.variable_for_secret(key, value)
        errors += [plain_secret(key, name)] if name else []
    if errors:
        raise ConfigErrors(errors)


def join_cut_words(words: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Return the words as they were meant, and an error for each that a shell has cut at its blanks."""
    meant, errors, rest = [], [], list(words)
    while rest:
        text, count = _first_whole_word(rest)
        meant.append(text)
        if count > 1:
            key, cut = text.partition("=")[0].lstrip("+~"), rest[:count]
            happened = f"came as {count} words, {', '.join(map(repr, cut))}: the shell splits at spaces"
            errors.append(ConfigError(key=key, happened=happened, expected=f"one word for {' '.join(cut)}", fix=shlex.quote(text)))
        rest = rest[count:]
    return meant, errors


def without_override(words: Sequence[str], keys: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> Iterator[ConfigError]:
    """Describe the mistake in words that are neither `key=value` nor `~key`: `keys` have their values, `groups` their options."""
    bare = [text for text in words if is_bare(text)]
    if bare and (problem := _misplaced_command(bare, [text for text in words if text not in bare], keys)):
        yield problem
        return
    while bare:
        text, *bare = bare
        key = text.lstrip("+")
        if key in groups:
            fix = f"{key}={bare.pop(0)}" if bare and bare[0] in groups[key] else ""
            yield ConfigError(key=key, happened="has no option", expected=f"one of {', '.join(groups[key])}", fix=fix)
        elif key in keys:
            fix = override(key, keys[key]) + ", its present value" if not isinstance(keys[key], Mapping) else ""
            yield ConfigError(key=key, happened="has no value", expected=f"{key}=VALUE", fix=fix)
        else:
            close, section = nearest(key, [*keys, *groups]), key.rpartition(".")[0]
            siblings = [name.rpartition(".")[2] for name in keys if section and name.rpartition(".")[0] == section]
            expected = "key=value, group=option, +key=value or ~key" + (f"; {section} has {', '.join(siblings)}" if siblings else "")
            here = instead_of(key, "VALUE") or instead_of("precision", key) or (f"{close}=VALUE" if close else "")
            fix = did_you_mean(here) if here else "ddp-train --help"
            yield ConfigError(key=key, happened="is not a key of this configuration, and has no value", expected=expected, fix=fix)


def is_bare(text: str) -> bool:
    """Tell whether a word is neither `key=value` nor `~key`."""
    return "=" not in text and not text.startswith("~")


def unreadable(text: str, error: Exception) -> ConfigError:
    """Return the fix for a value that Hydra's parser cannot read: most often a text needs quotes."""
    key, _, value = text.partition("=")
    if not key.lstrip("+~"):
        return ConfigError(happened=f"{text!r} has no key", expected="key=value, group=option, +key=value or ~key", fix="ddp-train --help")
    happened = f"{value!r} cannot be read" if value else str(error).splitlines()[0]
    expected = "matching brackets; quotes around text with spaces, brackets or special characters, and the shell's quotes around them"
    return ConfigError(key=key.lstrip("+~"), happened=happened, expected=expected, fix="" if _depth(value) else override(key, value))


def _misplaced_command(bare: Sequence[str], others: Sequence[str], keys: Mapping[str, Any]) -> ConfigError | None:
    """Return the fix for a word that stands where other programs have a command."""
    first, path = bare[0], Path(bare[-1])
    happened, is_sweep = f"ddp-train has no command {first!r}", (path / "sweep.json").exists()
    is_run = (path / "config.yaml").exists() or is_sweep

    def error(happened: str, expected: str, *command: str) -> ConfigError:
        return ConfigError(happened=happened, expected=expected, fix=shlex.join(["ddp-train", *command]))

    if first in COMMANDS:
        expected = "the command first" + (", and single values: a run that is resumed keeps its components" if first == "resume" else "")
        return error(f"{first!r} is a command, and comes after other words", expected, *bare, *_overrides_for(first, others, keys))
    if first in ("train", "fit", "run", "start"):
        return error(happened, "no command: ddp-train without one trains", *others)
    if first in ("eval", "test", "validate"):
        return error(happened, "a command", "evaluate", str(path) if len(bare) > 1 else "RUN", *others)
    if first == "version":
        return error(happened, "an option", "--version")
    if is_run and len(bare) == 1:
        happened = f"{first} is the folder of a {'sweep' if is_sweep else 'run'}, and no command was given for it"
        return error(happened, "a command", "resume", first, *_overrides_for("resume", others, keys))
    if (is_run or first not in keys) and (close := nearest(first, COMMANDS)):
        return error(happened, ", ".join(COMMANDS), close, *bare[1:], *_overrides_for(close, others, keys))
    return None


def _overrides_for(command: str, others: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    values = [text for text in others if not isinstance(keys.get(text.partition("=")[0], {}), Mapping)]
    return {"all": [*others], "values": values, "": []}[COMMANDS[command].overrides]


def _first_whole_word(words: Sequence[str]) -> tuple[str, int]:
    """Return the first word with those that belong to it, and how many they are."""
    text, count = words[0], 1
    for following in words[1:]:
        ends, begins = text.endswith("=") and is_bare(following), "=" not in text and following.startswith("=")
        if not (ends or begins or _depth(text) > 0):
            break
        text, count = text + " " * (_depth(text) > 0) + following, count + 1
    return (text, count) if _depth(text) == 0 else (words[0], 1)  # never closed, which Hydra's parser says


def _depth(text: str) -> int:
    return sum((char in "[{(") - (char in "]})") for char in text)


def _refuse_unknown_options(arguments: list[str]) -> None:
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
        name, equals, value = text.partition("=")
        here, close = instead_of(name, value or "VALUE"), nearest(name, own)
        if close and not here:
            here = f"{close}{text[len(name) :]}"
        fix = did_you_mean(here) if here else shlex.quote(text.lstrip("-")) if equals else "ddp-train --help"
        expected = "key=value without dashes, or an option of ddp-train --help"
        errors.append(ConfigError(happened=f"{name} is not an option", expected=expected, fix=fix))
    if errors:
        raise ConfigErrors(errors)


def options_first(arguments: list[str]) -> list[str]:
    """Put options, with their values, before overrides: Hydra's parser takes no override after an option that follows one.

    Raises ConfigErrors: an option is not known, or lacks its value.
    """
    _refuse_unknown_options(arguments)
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    return [*(text for text in arguments if text not in overrides), *overrides]


def require_config(args: Any, loader: ConfigLoaderImpl) -> None:
    """Refuse a folder or a root config that is not there."""
    if args.config_dir is not None and not os.path.isdir(args.config_dir):
        happened, expected = f"there is no folder {os.path.abspath(args.config_dir)}", "a folder with YAML in folders named after groups"
        raise ConfigErrors([ConfigError(key="--config-dir", happened=happened, expected=expected)])
    if args.config_name is not None and not loader.repository.config_exists(args.config_name):
        options = loader.get_group_options("", results_filter=ObjectType.CONFIG)
        names = [name for name in options if not name.startswith("_")]  # those are Hydra's
        is_experiment = args.config_name in loader.get_group_options("experiment")
        fix = f"experiment={args.config_name}" if is_experiment else f"--config-name={nearest(args.config_name, names) or 'config'}"
        happened = f"there is no {args.config_name}.yaml for the root of the configuration"
        raise ConfigErrors([ConfigError(key="--config-name", happened=happened, expected=f"one of {', '.join(names)}", fix=fix)])


def options_of(hydra: DictConfig) -> list[str]:
    """Return what a command line needs, apart from its overrides, to find the same YAML again."""
    here = Path.cwd()
    sources = hydra.runtime.config_sources
    added = [Path(source.path) for source in sources if source.provider == "command-line"]
    instead = [source.path for source in sources if source.provider == "main" and Path(source.path) != CONF]
    found = [f"--config-path={path}" for path in instead]  # whole: Hydra takes a relative one for a module of ours
    found += [f"--config-dir={folder.relative_to(here) if folder.is_relative_to(here) else folder}" for folder in added]
    found += [f"--config-name={hydra.job.config_name}"] if hydra.job.config_name not in (None, "config") else []
    return found + [text for text in texts(hydra.overrides.hydra) if text.lstrip("+").startswith("hydra.searchpath=")]


def with_conf(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the project's YAML as if `--config-dir` were typed; one that is typed counts instead.

    Raises ConfigError: pyproject.toml cannot be read, or says something else than an existing folder.
    """
    is_typed = any(word == "-cd" or word.startswith(("--config-dir", "-cd=")) for word in words)
    folder = None if is_typed else _conf_folder()
    return [*words] if folder is None else [f"--config-dir={folder}", *words]


def _conf_folder() -> str | None:
    """Return the folder that pyproject.toml names, as it stands there; None: there is no such file, or it names none."""
    try:
        content: Any = tomllib.loads(Path(_PYPROJECT).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(key=_PYPROJECT, happened=f"cannot be read: {error}", fix="mend it, or --config-dir=FOLDER") from None
    if (table := content.get("tool", {}).get("ddp_train")) is None:
        return None
    if [*table] != ["conf"] or not isinstance(folder := table["conf"], str):
        expected = "one key, conf: the folder with YAML in folders named after groups"
        raise ConfigError(key=f"{_PYPROJECT}: tool.ddp_train", happened=f"has {table}", expected=expected, fix='conf = "conf"')
    if not Path(folder).is_dir():
        happened = f"names {folder!r}, and there is no such folder here"
        raise ConfigError(key=f"{_PYPROJECT}: tool.ddp_train.conf", happened=happened, fix=f"mkdir {folder}")
    return folder
