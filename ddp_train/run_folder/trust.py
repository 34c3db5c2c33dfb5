"""Where a run may write, and whose run may be continued. docs/security.md says against whom.

A folder that somebody types is theirs to choose. What a *name* brings into it (a config value that is filled into a pattern, a link below
`outputs/`) must not lead anywhere else.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ddp_train.errors import ConfigError
from ddp_train.system.folder_lock import HOLDER

_CONTINUED = (  # what a run is continued from
    *("config.yaml", "sweep.json", ".hydra/*", "checkpoints", "checkpoints/*", "checkpoints/*/*"),
    *("compiled", "compiled/*", "compiled/*/*"),  # which are executed
)


def check_pattern(pattern: str, folder: str, *, key: str) -> list[ConfigError]:
    """Return what is wrong with a folder that values were filled into.

    Args:
        pattern: as it was written, with `${...}`.
        folder: what it came to.
    """
    if not folder.isprintable():
        return [ConfigError(key=key, happened=f"is {folder!r}", expected="a path without control characters")]
    if ".." in Path(folder).parts and ".." not in Path(pattern).parts:
        return [
            ConfigError(
                key=key,
                happened=f"{pattern} leads to {folder}",
                expected="values without '..': a name does not choose the folder",
                fix=f"{key}=FOLDER, typed, where another one is wanted",
            )
        ]
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


def require_own(folder: Path, *, key: str) -> None:
    """Refuse to continue what somebody else could have written: its config names the code to run. Ask it while the folder is held.

    Raises:
        ConfigError: a part of the folder belongs to another user, can be written by everybody, or is a link.
    """
    holders = [place / HOLDER for place in (folder, *folder.parents) if (place / HOLDER).exists()]
    owner = holders[0].stat().st_uid if holders else os.getuid()  # how this file system sees us: a server may have another name for root
    continued = [path for pattern in _CONTINUED for path in folder.glob(pattern)]
    for path in (folder, *continued) if folder.exists() else ():
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode) and path != folder:
            happened, fix = f"{path} is a link", "put the file itself in its place"
        elif facts.st_uid != owner and path != folder:
            happened, fix = f"{path} belongs to another user (uid {facts.st_uid})", f"a copy of your own: cp -r {folder} FOLDER"
        elif facts.st_mode & stat.S_IWOTH and not stat.S_ISLNK(facts.st_mode):
            happened, fix = f"everybody can write {path}", f"chmod -R o-w {folder}, after a look at what is in it"
        else:
            continue
        raise ConfigError(
            key=key, happened=happened, expected="a folder that only you can have written: its config says what is run", fix=fix
        )
