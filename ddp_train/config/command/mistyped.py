"""What is wrong with one override, and what to type instead: a value that cannot be read, a key that is not there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override

from ddp_train.config.schema import SECTIONS, TARGETS
from ddp_train.config.spelling import CALLED_HERE, nearest, override
from ddp_train.config.targets.target import look_up, takes
from ddp_train.config.tree import nodes
from ddp_train.errors import ConfigError

_OPEN = ("metrics", "callbacks", "cluster.env", "init_from_keys", "extra", "evaluation.sets")  # sections that take any name


def unreadable(text: str, error: Exception) -> ConfigError:
    """Say what to do about a value that Hydra's parser cannot read: most often a text that needs quotes."""
    key, _, value = text.partition("=")
    open_ = _closing(value)
    if not key.lstrip("+~"):
        return ConfigError(happened=f"{text!r} has no key", expected="key=value, group=option, +key=value or ~key", fix="ddp-train --help")
    happened = f"{value!r} cannot be read" if value else str(error).splitlines()[0]
    fix = shlex.quote(f"{key}={value}{open_}") if open_ else override(key, value)
    expected = (
        "as many brackets closed as opened"
        if open_
        else "quotes around text with blanks, brackets or letters beyond a-z, and the shell's around them"
    )
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


def not_there(given: Override, tree: Mapping[str, Any], valid: list[str]) -> ConfigError:
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
    return unknown_key(key, value, valid)


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


def unknown_key(key: str, value: str, valid: list[str]) -> ConfigError:
    close, section = nearest(key, valid), key.rpartition(".")[0]
    beside = [name for name in valid if section and name.rpartition(".")[0] == section]
    return ConfigError(
        key=key,
        happened="is not a key of this configuration",
        expected="" if close or not beside else f"one of {', '.join(beside)}",
        fix=f"did you mean {shlex.quote(f'{close}={value}')}?" if close else "leave it out",
    )
