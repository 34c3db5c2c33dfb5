"""The words of a command line: what the shell has cut is put together, and what is no override, or holds a secret, is named."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_train import redaction
from ddp_train.config import limits
from ddp_train.config.check import ConfigErrors, plain_secret
from ddp_train.config.spelling import nearest, override
from ddp_train.errors import ConfigError

COMMANDS = (
    *("plan", "resume", "evaluate", "predict", "export", "runs", "status", "logs", "profile", "cancel"),
    *("verdict", "doctor", "help", "node", "prepare", "init"),
)
_TAKE_ALL = ("plan", "prepare", "doctor", "evaluate", "predict")  # overrides; `resume` takes single values, the others none
_TRAINS = ("train", "fit", "run", "start")
_EVALUATES = ("eval", "test", "validate")
_BRACKETS = {"[": "]", "{": "}", "(": ")"}


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that hold a secret, or more than a config may, before anything parses or shows them."""
    limits.check_overrides(overrides)
    errors = []
    for text in dict.fromkeys([*overrides, *whole(overrides)[0]]):  # as they came, and as they were meant
        key, equals, value = text.partition("=")
        key, value = (key.lstrip("+~-").strip(), value.strip("'\" ")) if equals else ("", text)
        name = redaction.spelled_out(key, value)
        errors += [plain_secret(key, name)] if name else []
    if errors:
        raise ConfigErrors(errors)


def whole(words: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Return the words as they were meant, and an error for each that a shell has cut at its blanks."""
    meant, errors, rest = [], [], list(words)
    while rest:
        text, count = _together(rest)
        meant.append(text)
        if count > 1:
            key, cut = text.partition("=")[0].lstrip("+~"), rest[:count]
            happened = f"came as {count} words, {', '.join(map(repr, cut))}: the shell cuts at blanks"
            errors.append(ConfigError(key=key, happened=happened, expected=f"one word for {' '.join(cut)}", fix=shlex.quote(text)))
        rest = rest[count:]
    return meant, errors


def without_override(words: Sequence[str], keys: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> Iterator[ConfigError]:
    """Yield what to say of words that are neither `key=value` nor `~key`.

    Args:
        keys: every key of the configuration, with its value.
        groups: every group, with its options.
    """
    bare = [text for text in words if is_bare(text)]
    others = [text for text in words if text not in bare]
    if bare and (problem := _command(bare, others, keys)):
        yield problem
        return
    while bare:
        text, *bare = bare
        key = text.lstrip("+")
        if key in groups:
            fix = f"{key}={bare.pop(0)}" if bare and bare[0] in groups[key] else ""
            yield ConfigError(key=key, happened="has no option behind it", expected=f"one of {', '.join(groups[key])}", fix=fix)
        elif key in keys:
            fix = override(key, keys[key]) + ", which is what it is" if not isinstance(keys[key], Mapping) else ""
            yield ConfigError(key=key, happened="has no value behind it", expected=f"{key}=VALUE", fix=fix)
        else:
            close, section = nearest(key, [*keys, *groups]), key.rpartition(".")[0]
            siblings = [name.rpartition(".")[2] for name in keys if section and name.rpartition(".")[0] == section]
            expected = "key=value, group=option, +key=value or ~key" + (f"; {section} has {', '.join(siblings)}" if siblings else "")
            fix = f"did you mean {close}=VALUE?" if close else "ddp-train --help"
            yield ConfigError(key=key, happened="is no key of this configuration, and has no value behind it", expected=expected, fix=fix)


def is_bare(text: str) -> bool:
    """Tell whether a word is neither `key=value` nor `~key`."""
    return "=" not in text and not text.startswith("~")


def unreadable(text: str, error: Exception) -> ConfigError:
    """Say what to do about a value that Hydra's parser cannot read: most often a text that needs quotes."""
    key, _, value = text.partition("=")
    if not key.lstrip("+~"):
        return ConfigError(happened=f"{text!r} has no key", expected="key=value, group=option, +key=value or ~key", fix="ddp-train --help")
    happened = f"{value!r} cannot be read" if value else str(error).splitlines()[0]
    expected, fix = "quotes around text with blanks, brackets or letters beyond a-z, and the shell's around them", override(key, value)
    if closing := _closing(value):
        expected, fix = "as many brackets closed as opened", shlex.quote(f"{key}={value}{closing}")
    return ConfigError(key=key.lstrip("+~"), happened=happened, expected=expected, fix=fix)


def _closing(value: str) -> str:
    """Return the brackets that are left to close, in their order; "" where others are wrong too."""
    left = ""
    for char in value:
        if char in _BRACKETS:
            left = _BRACKETS[char] + left
        elif char in _BRACKETS.values():
            if not left.startswith(char):
                return ""
            left = left[1:]
    return left


def _command(bare: Sequence[str], others: Sequence[str], keys: Mapping[str, Any]) -> ConfigError | None:
    """Say what was meant by a word that stands where other programs have a command."""
    first, path = bare[0], Path(bare[-1])
    happened, is_sweep = f"ddp-train has no command {first!r}", (path / "sweep.json").exists()
    is_run = (path / "config.yaml").exists() or is_sweep

    def error(happened: str, expected: str, *command: str) -> ConfigError:
        return ConfigError(happened=happened, expected=expected, fix=shlex.join(["ddp-train", *command]))

    if first in COMMANDS:
        expected = "the command first" + (", and single values: a run that is resumed keeps its components" if first == "resume" else "")
        return error(f"{first!r} is a command, and stands behind other words", expected, *bare, *_taken(first, others, keys))
    if first in _TRAINS:
        return error(happened, "nothing: ddp-train without one trains", *others)
    if first in _EVALUATES:
        return error(happened, "a command", "evaluate", str(path) if len(bare) > 1 else "RUN", *others)
    if first == "version":
        return error(happened, "an option", "--version")
    if is_run and len(bare) == 1:
        happened = f"{first} is the folder of a {'sweep' if is_sweep else 'run'}, and nothing says what to do with it"
        return error(happened, "a command", "resume", first, *_taken("resume", others, keys))
    if (is_run or first not in keys) and (close := nearest(first, COMMANDS)):
        return error(happened, ", ".join(COMMANDS), close, *bare[1:], *_taken(close, others, keys))
    return None


def _taken(command: str, others: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """Return the overrides that a command takes."""
    values = [text for text in others if not isinstance(keys.get(text.partition("=")[0], {}), Mapping)]
    return [*others] if command in _TAKE_ALL else values if command == "resume" else []


def _together(words: Sequence[str]) -> tuple[str, int]:
    """Return the first word with those that belong to it, and how many they are."""
    text, count = words[0], 1
    for following in words[1:]:
        if _depth(text) > 0:
            text += f" {following}"
        elif ("=" not in text and following.startswith("=")) or (
            text.endswith("=") and "=" not in following and not following.startswith("~")
        ):
            text += following
        else:
            break
        count += 1
    return (text, count) if _depth(text) == 0 else (words[0], 1)  # never closed, which Hydra's parser says


def _depth(text: str) -> int:
    return sum((char in _BRACKETS) - (char in _BRACKETS.values()) for char in text)
