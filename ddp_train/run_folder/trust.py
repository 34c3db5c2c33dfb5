"""Checks where a run may write, and whose run may be continued. docs/security.md describes the threats.

A typed folder is the user's choice. A *name* in it (a config value that is filled into a pattern, a link below `outputs/`) must not lead
anywhere else.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import SWEEP_FILE

_NAMES_CODE = ("config.yaml", SWEEP_FILE, "conf/**/*.yaml")  # a run or a sweep is built from these

_READ = (
    *_NAMES_CODE,
    *("task.json", "environment.json", "code.json", "code.tar.gz", ".hydra/*", "checkpoints", "checkpoints/*", "checkpoints/*/*"),
    *("compiled", "compiled/*", "compiled/*/*"),  # executed code
)

_RUNS = {"cluster", "hydra", "command", "working_directory", "code"}
"""Every text under these keys decides what runs: setup lines, the environment, a Python, hosts; the words of a sweep."""

_MAX_CHARACTERS = 1_000_000

_accepted: set[Path] = set()


def check_pattern(pattern: str, folder: str, *, key: str) -> list[ConfigError]:
    """Return the problems of a folder that values were filled into, where `pattern` has `${...}`."""
    if not folder.isprintable():
        return [ConfigError(key=key, happened=f"is {folder!r}", expected="a path without control characters")]
    if ".." in Path(folder).parts and ".." not in Path(pattern).parts:
        expected = "values without '..': a name must not change the folder"
        fix = f"type {key}=FOLDER for another folder"
        return [ConfigError(key=key, happened=f"{pattern} leads to {folder}", expected=expected, fix=fix)]
    return []


def check_below(root: Path, folder: Path, *, key: str) -> list[ConfigError]:
    """Return the problems of a folder that must lie below `root`, and be reached without a link."""
    if root not in folder.parents or ".." in folder.relative_to(root).parts:
        return [ConfigError(key=key, happened=f"leads to {folder}", expected=f"a folder below {root}")]
    for parent in (folder, *folder.parents):
        if parent == root:
            return []
        if parent.is_symlink():
            expected = f"folders of their own below {root}"
            return [ConfigError(key=key, happened=f"{parent} is a link", expected=expected, fix=f"remove {parent}")]
    return []


def require_trust(path: Path, *, key: str, accept: str, is_trusted: bool = False, why: str = "") -> None:
    """Refuse to build from files that another user could have written, until they were shown and accepted.

    Called for typed commands, never for a run that continues unattended: its own user has begun it.

    Args:
        path: a run folder, the folder of a sweep, or a spec.
        accept: how a user accepts it.
        is_trusted: it was accepted; this process does not ask again
        why: a reason that is known beforehand: it came as a file
    """
    if is_trusted:
        _accepted.add(path.absolute())
    if path.absolute() in _accepted or not (why := why or _of_another_user(path)):
        return
    files = [file for folder in _run_folders(path) for pattern in _NAMES_CODE for file in sorted(folder.glob(pattern)) if file.is_file()]
    lines = [line for file in files or [path] for line in (f"{file}:", *(f"  {text}" for text in _what_runs(file)))]
    lines += [f"{path}/compiled: machine code of torch.compile"] if (path / "compiled").exists() else []
    happened = "\n    ".join([f"{why}; these values, and all others in these files, would run as you:", *lines])
    expected = "files that only you can write, or your consent"
    raise ConfigError(key=key, happened=happened, expected=expected, fix=f"read the files, then type: {accept}")


def _of_another_user(top: Path) -> str:
    """Say why another user than this one and root could have written a folder or a file; "": none could."""
    read = {path for folder in _run_folders(top) for pattern in _READ for path in (folder, *folder.glob(pattern)) if folder.is_dir()}
    folders = {parent for path in read for parent in path.parents if top in parent.parents}
    for path in (top, *sorted(read | folders)):
        try:
            status = path.stat() if path == top else path.lstat()
        except FileNotFoundError:  # a checkpoint that a running process has just finished, or removed
            if path == top:
                raise
            continue
        if stat.S_ISLNK(status.st_mode):
            return f"{path} is a link"
        if status.st_mode & stat.S_IWOTH:
            return f"every user can write {path}"
        if status.st_uid not in (os.getuid(), 0) and status.st_uid != _own_number(path if path.is_dir() else path.parent):
            return f"{path} belongs to another user (uid {status.st_uid})"
    return ""


def _run_folders(top: Path) -> list[Path]:
    """Return a folder, and for a sweep the folders of its jobs."""
    try:
        return [top, *(top / job["folder"] for job in json.loads((top / SWEEP_FILE).read_text())["jobs"])]
    except (OSError, ValueError, KeyError, TypeError):
        return [top]


def _own_number(folder: Path) -> int:
    """Return the uid of this user's new files in a folder: a file server may map root to another uid."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.getuid()


def _what_runs(file: Path) -> list[str]:
    """Return the values in a YAML or JSON that decide what is run, as `key: value`, without resolving or importing anything."""
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
