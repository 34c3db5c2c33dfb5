"""Where a run may write, and whose run may be continued. docs/security.md says against whom.

A folder that was typed is chosen. What a *name* brings into it (a config value that is filled into a pattern, a link below
`outputs/`) must not lead anywhere else.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ddp_train.errors import ConfigError

_NAMES_CODE = ("config.yaml", "sweep.json", "conf/**/*.yaml")  # what a run is built from, and a sweep

_READ = (
    *_NAMES_CODE,
    *("task.json", ".hydra/*", "checkpoints", "checkpoints/*", "checkpoints/*/*"),
    *("compiled", "compiled/*", "compiled/*/*"),  # which are executed
)

_RUNS = {"cluster", "hydra", "command", "working_directory", "code"}
"""Under these keys each text counts: setup lines, the environment, a Python, hosts; the words that a sweep is composed from."""

_MAX_CHARACTERS = 1_000_000

_accepted: set[Path] = set()


def check_pattern(pattern: str, folder: str, *, key: str) -> list[ConfigError]:
    """Return what is wrong with a folder that values were filled into, where `pattern` has `${...}`."""
    if not folder.isprintable():
        return [ConfigError(key=key, happened=f"is {folder!r}", expected="a path without control characters")]
    if ".." in Path(folder).parts and ".." not in Path(pattern).parts:
        expected, fix = "values without '..': a name does not choose the folder", f"{key}=FOLDER, typed, where another one is wanted"
        return [ConfigError(key=key, happened=f"{pattern} leads to {folder}", expected=expected, fix=fix)]
    return []


def check_below(root: Path, folder: Path, *, key: str) -> list[ConfigError]:
    """Return what is wrong with a folder that should lie below `root`, and come there by no link."""
    if root not in folder.parents or ".." in folder.relative_to(root).parts:
        return [ConfigError(key=key, happened=f"leads to {folder}", expected=f"a folder below {root}")]
    for part in (folder, *folder.parents):
        if part == root:
            return []
        if part.is_symlink():
            return [ConfigError(key=key, happened=f"{part} is a link", expected=f"folders of their own below {root}", fix=f"remove {part}")]
    return []


def require_trust(path: Path, *, key: str, accept: str, is_trusted: bool = False) -> None:
    """Refuse to build what another user could have written, until it was shown and accepted.

    Ask it where a command was typed, never where something goes on unattended: that continues what its own user has begun.

    Args:
        path: a run folder, the folder of a sweep, or a spec.
        accept: how a user accepts it.
        is_trusted: that was done. This process does not ask again.
    """
    if is_trusted:
        _accepted.add(path.absolute())
    if path.absolute() in _accepted or not (why := _of_another_user(path)):
        return
    files = [file for folder in _run_folders(path) for pattern in _NAMES_CODE for file in sorted(folder.glob(pattern)) if file.is_file()]
    lines = [line for file in files or [path] for line in (f"{file}:", *(f"  {each}" for each in _what_runs(file)))]
    lines += [f"{path}/compiled: machine code of torch.compile"] if (path / "compiled").exists() else []
    happened = "\n    ".join([f"{why}; this would run as you, with the other values of these files:", *lines])
    expected = "what only you can have written, or your consent"
    raise ConfigError(key=key, happened=happened, expected=expected, fix=f"read it, and then: {accept}")


def _of_another_user(top: Path) -> str:
    """Say by whom a folder or a file could have been written, other than this user and root; "" where by no other."""
    read = {path for folder in _run_folders(top) for pattern in _READ for path in (folder, *folder.glob(pattern)) if folder.is_dir()}
    folders = {parent for path in read for parent in path.parents if top in parent.parents}
    for path in (top, *sorted(read | folders)):
        try:
            facts = path.stat() if path == top else path.lstat()
        except FileNotFoundError:  # a checkpoint that a running process has just finished, or removed
            if path == top:
                raise
            continue
        if stat.S_ISLNK(facts.st_mode):
            return f"{path} is a link"
        if facts.st_mode & stat.S_IWOTH:
            return f"everybody can write {path}"
        if facts.st_uid not in (os.getuid(), 0) and facts.st_uid != _own_number(path if path.is_dir() else path.parent):
            return f"{path} belongs to another user (uid {facts.st_uid})"
    return ""


def _run_folders(top: Path) -> list[Path]:
    """Return a folder, and those of its jobs where it is a sweep's."""
    try:
        return [top, *(top / job["folder"] for job in json.loads((top / "sweep.json").read_text())["jobs"])]
    except (OSError, ValueError, KeyError, TypeError):
        return [top]


def _own_number(folder: Path) -> int:
    """Return the number that files of this user get in a folder: a file server may have another one for root."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.getuid()


def _what_runs(file: Path) -> list[str]:
    """Return what of a YAML or JSON decides what is run, as `key: value`: nothing is resolved, imported or written out."""
    try:
        text = file.read_text(encoding="utf-8")
        if len(text) > _MAX_CHARACTERS:
            return [f"more than {_MAX_CHARACTERS:,} characters"]
        return list(_named((), json.loads(text) if file.suffix == ".json" else yaml.safe_load(text), set()))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return [f"cannot be read ({type(error).__name__})"]


def _named(path: tuple[str, ...], value: Any, shown: set[int]) -> Iterator[str]:
    if isinstance(value, (dict, list)):
        if id(value) not in shown:  # what an alias repeats
            shown.add(id(value))
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _named((*path, str(key)), item, shown)
    elif isinstance(value, str) and value and (path[-1:] == ("_target_",) or "${" in value or not _RUNS.isdisjoint(path)):
        yield f"{'.'.join(path)}: {value}" if f"{path}{value}".isprintable() else repr(f"{'.'.join(path)}: {value}")
