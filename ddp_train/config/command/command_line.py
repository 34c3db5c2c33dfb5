"""The words of a command line: what the shell has cut is put together, and what is no override is named.

Imports no torch and no Hydra.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_train.config.spelling import nearest, override
from ddp_train.errors import ConfigError

_COMMAND_FIRST = {
    "plan": "the command first, then the words of the run",
    "resume": "the command first, and single values: a run that is resumed keeps its components",
    "evaluate": "the command first, then a run and what differs from it",
    "predict": "the command first, then a run and what differs from it",
    "export": "the command first, then a run",
    "runs": "the command first, and nothing but the folder of a sweep",
    "status": "the command first, and nothing but a run folder or the folder of a sweep",
    "logs": "the command first",
    "profile": "the command first, and nothing but a run folder",
    "cancel": "the command first",
    "verdict": "the command first, and nothing but a run folder",
    "doctor": "the command first, then what the run would be given",
    "help": "the command first, and one key, group or group=option",
    "node": "the command first, and nothing but a spec.json",
    "prepare": "the command first",
    "init": "the command first, and nothing but a new folder",
}
COMMANDS = tuple(_COMMAND_FIRST)
_TRAINS = ("train", "fit", "run", "start")
_EVALUATES = ("eval", "test", "validate")
_OPEN, _CLOSE = "[{(", "]})"


def whole(words: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Return the words as they were meant, and an error for each that a shell has cut at its blanks."""
    meant, errors = [], []
    rest = list(words)
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
            chosen = bare.pop(0) if bare and bare[0] in groups[key] else None
            fix = f"{key}={chosen}" if chosen else ""
            yield ConfigError(key=key, happened="has no option behind it", expected=f"one of {', '.join(groups[key])}", fix=fix)
        elif key in keys:
            fix = override(key, keys[key]) + ", which is what it is" if not isinstance(keys[key], Mapping) else ""
            yield ConfigError(key=key, happened="has no value behind it", expected=f"{key}=VALUE", fix=fix)
        else:
            close = nearest(key, [*keys, *groups])
            section = key.rpartition(".")[0]
            beside = [other.rpartition(".")[2] for other in keys if section and other.rpartition(".")[0] == section]
            has = f"; {section} has {', '.join(beside)}" if beside else ""
            expected = f"key=value, group=option, +key=value or ~key{has}"
            fix = f"did you mean {close}=VALUE?" if close else "ddp-train --help"
            yield ConfigError(key=key, happened="is no key of this configuration, and has no value behind it", expected=expected, fix=fix)


def is_bare(text: str) -> bool:
    """Tell whether a word is neither `key=value` nor `~key`."""
    return "=" not in text and not text.startswith("~")


def _command(bare: Sequence[str], others: Sequence[str], keys: Mapping[str, Any]) -> ConfigError | None:
    """Say what was meant by a word that stands where other programs have a command."""
    first, path = bare[0], Path(bare[-1])
    happened = f"ddp-train has no command {first!r}"
    is_run = (path / "config.yaml").exists() or (path / "sweep.json").exists()
    if first in COMMANDS:
        fix = shlex.join(["ddp-train", *bare, *_taken(first, others, keys)])
        return ConfigError(happened=f"{first!r} is a command, and stands behind other words", expected=_COMMAND_FIRST[first], fix=fix)
    if first in _TRAINS:
        return ConfigError(happened=happened, expected="nothing: ddp-train without one trains", fix=shlex.join(["ddp-train", *others]))
    if first in _EVALUATES:
        folder = str(path) if len(bare) > 1 else "RUN"
        return ConfigError(happened=happened, expected="a command", fix=shlex.join(["ddp-train", "evaluate", folder, *others]))
    if first == "version":
        return ConfigError(happened=happened, expected="an option", fix="ddp-train --version")
    if is_run and len(bare) == 1:
        happened = f"{first} is the folder of a {'sweep' if (path / 'sweep.json').exists() else 'run'}, and nothing says what to do with it"
        fix = shlex.join(["ddp-train", "resume", first, *_taken("resume", others, keys)])
        return ConfigError(happened=happened, expected="a command", fix=fix)
    if (is_run or first not in keys) and (close := nearest(first, COMMANDS)):
        fix = shlex.join(["ddp-train", close, *bare[1:], *_taken(close, others, keys)])
        return ConfigError(happened=happened, expected=", ".join(COMMANDS), fix=fix)
    return None


def _taken(command: str, others: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """Return the overrides that a command takes: `resume` those of single values, `runs` none."""
    if command in ("plan", "prepare", "doctor", "evaluate", "predict"):
        return list(others)
    return [text for text in others if command == "resume" and not isinstance(keys.get(text.partition("=")[0], {}), Mapping)]


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
    return sum((char in _OPEN) - (char in _CLOSE) for char in text)
