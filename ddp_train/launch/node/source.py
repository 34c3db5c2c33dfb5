"""The code that the ranks of a machine would run: ddp_train's own, and the user's, as a hash of each file."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from ddp_train import FOLDER

_MOST_FILES = 3000
_GIT_WITHIN_S = 1.0
_PASSED_OVER = ("__pycache__", "site-packages", "node_modules")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The Python files that a machine has."""

    hashes: dict[str, str]  # file -> hash of what is in it
    listed_by: str  # "git" or "folder": what one names the other may pass over
    is_whole: bool  # all of them are in `hashes`


def look_at_source(snapshot: Path | None, *, within_s: float) -> Source:
    """Hash ddp_train's own files and the user's.

    Args:
        snapshot: the folder of the frozen code; None: what the repository in which the user stands tracks or does not ignore, or else
            all Python files below where they stand.
        within_s: how long it may take. Our own files are read in any case.
    """
    deadline = time.monotonic() + within_s
    hashes = {f"{FOLDER.name}/{file.relative_to(FOLDER)}": _hash(file) for file in sorted(FOLDER.rglob("*.py"))}
    root, names = (None, None) if snapshot is not None else _tracked()
    listed_by = "folder" if names is None else "git"
    root = root or snapshot or Path.cwd()
    own = FOLDER.resolve()
    is_whole = True
    for name in names if names is not None else _below(root, deadline):
        if len(hashes) >= _MOST_FILES or time.monotonic() > deadline:
            is_whole = False
            break
        file = root / name
        if file.is_file() and not file.resolve().is_relative_to(own):  # git lists what was removed, too
            hashes[name] = _hash(file)
    return Source(hashes=hashes, listed_by=listed_by, is_whole=is_whole and time.monotonic() <= deadline)


def _tracked() -> tuple[Path | None, list[str] | None]:
    """Return the root of the git repository in which the user stands, and its Python files that it does not ignore; None: there is none."""
    root = _git("rev-parse", "--show-toplevel")
    names = _git("ls-files", "-z", "--full-name", "--cached", "--others", "--exclude-standard", "--", ":(top)*.py") if root else None
    if root is None or names is None:
        return None, None
    return Path(root.rstrip("\n")), sorted(set(filter(None, names.split("\0"))))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=_GIT_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _below(root: Path, deadline: float) -> Iterator[str]:
    """Yield the Python files below a folder, but not those of environments, of hidden folders and of the frozen code of runs."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        if time.monotonic() > deadline:
            return
        folders[:] = sorted(name for name in folders if not _is_passed_over(here / name))
        yield from (str((here / name).relative_to(root)) for name in sorted(files) if name.endswith(".py"))


def _is_passed_over(folder: Path) -> bool:
    is_snapshot = folder.name == "code" and (folder.parent / "spec.json").exists()
    return folder.name.startswith(".") or folder.name in _PASSED_OVER or is_snapshot or (folder / "pyvenv.cfg").exists()


def _hash(file: Path) -> str:
    """Return the hash of a file; "" for one that cannot be read, which nobody compares."""
    try:
        return xxh3_64_hexdigest(file.read_bytes())
    except OSError:
        return ""
