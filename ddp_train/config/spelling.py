"""How overrides are written, and the valid name nearest to a wrong one. All advice can be pasted. Imports no torch.

What scripts and other frameworks call things, and what is typed here, is the table field_words.yaml.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddp_train.errors import ConfigError
from ddp_train.system import redaction

_PLAIN = re.compile(r"[A-Za-z_./][\w./:@%+-]*", re.ASCII)  # text that Hydra's parser takes without quotes

_WORDS = ("null", "true", "false", "nan", "inf")
LEAVE_IT_OUT = "leave it out, "


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the valid name nearest to `name`, or "" when none is close.

    Dotted names are compared by the last part, first within the same section: all names of a section share their beginning.
    """
    names = list(dict.fromkeys(names))
    section, _, last = name.rpartition(".")
    if (meant := instead_of(last, "VALUE").removesuffix("=VALUE")) in names:
        return meant
    same = [other for other in names if section and "." in other and other.rpartition(".")[2] == last and not other.startswith("hydra.")]
    if len(same) == 1:  # in another section
        return same[0]
    siblings = {other.rpartition(".")[2]: other for other in reversed(names) if other.rpartition(".")[0] == section}
    same_ending = [sibling for sibling in reversed(siblings) if sibling.endswith(f"_{last}")]
    close = same_ending or get_close_matches(last, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    keys = [other for other in names if "." in other or not section]  # a key in a section is no group
    elsewhere = [other for other in keys if f".{other}".endswith(f".{last}")] or [other for other in keys if other.endswith(f"_{last}")]
    same_depth = [other for other in names if other.count(".") == name.count(".")]  # a wrong section
    return elsewhere[0] if elsewhere else next(iter(get_close_matches(name, same_depth, n=1, cutoff=0.8)), "")


def override(key: str, value: Any, *, sign: str = "", was: str = "") -> str:
    """Return an override as it is typed in a shell, with references instead of secrets; `was`: its present key."""
    return shlex.quote(f"{sign}{key}={text_of(without_secrets(key, without_secrets(was, value)))}")


def without_secrets(key: str, value: Any) -> Any:
    """Return a value for display: with a variable's name instead of every secret in plain text."""
    if isinstance(value, Mapping):
        return {name: without_secrets(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(key, inner) for inner in value]
    name = redaction.variable_for_secret(key, value)
    return redaction.reference(name) if name else value


def unknown_key(key: str, valid: Iterable[str], value: Any) -> ConfigError:
    """Return the error for a key that does not exist, with the nearest valid key, if there is one."""
    valid, section = list(dict.fromkeys(valid)), key.rpartition(".")[0]
    if not key.startswith("hydra.") and (typed_here := instead_of(key, without_secrets(key, value))):
        return ConfigError(key=key, happened="is not a key of this configuration", fix=did_you_mean(typed_here))
    close = nearest(key, valid)
    expected = "" if close else f"one of {', '.join(other for other in valid if other.rpartition('.')[0] == section)}"
    fix = f"did you mean {override(close, value, was=key)}?" if close else f"remove it: {removal(key, value)}"
    return ConfigError(key=key, happened="is not a key of this configuration", expected=expected, fix=fix)


def did_you_mean(typed_here: str) -> str:
    """Return an advice to type that, or a sentence of `field_words` as it is."""
    return typed_here if typed_here.startswith(LEAVE_IT_OUT) else f"did you mean {typed_here}?"


def removal(key: str, value: Any) -> str:
    """Return the override that removes a key. Hydra does not find one that is null."""
    return f"{key}=0 {shlex.quote(f'~{key}')}" if value is None else shlex.quote(f"~{key}")


def text_of(value: Any) -> str:
    """Write a value for Hydra's parser."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{text_of(key)}:{text_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(text_of(item) for item in value) + "]"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


@cache
def field_words() -> dict[str, dict[str, str]]:
    """Return the override of ours for each name of other programs, by that name and the value behind it ("": any other value)."""
    table: dict[str, dict[str, str]] = {}
    for here, words in yaml.safe_load(Path(__file__).with_name("field_words.yaml").read_text()).items():
        for word, _, value in (text.partition("=") for text in words.split()):
            table.setdefault(word, {})[value] = here
    return table


def instead_of(key: str, value: Any) -> str:
    """Return the override to type, or a remark that there is none, for a key whose last part other programs use; "": not in the table."""
    typed = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    by_value = field_words().get(key.rpartition(".")[2].lstrip("-").replace("-", "_"), {})
    here = by_value.get(typed.lower(), by_value.get("", ""))
    return "" if "{}" in here and not typed else here.format(shlex.quote(typed))
