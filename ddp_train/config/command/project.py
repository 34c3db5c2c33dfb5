"""A project's own YAML, which commands find without flags: pyproject.toml, in the folder where one stands, says where it lies.

    [tool.ddp_train]
    conf = "conf"

Relative paths of a run mean the folder where one stands, and so does this: no folder above it is looked at.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.config.spelling import nearest
from ddp_train.errors import ConfigError

_FILE = "pyproject.toml"
_OPTION = "--config-dir"


def with_conf(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the project's YAML as if `--config-dir` were typed; one that is typed counts instead.

    Raises:
        ConfigError: pyproject.toml cannot be read, or says something else than an existing folder.
    """
    is_typed = any(word == "-cd" or word.startswith((_OPTION, "-cd=")) for word in words)
    folder = None if is_typed else conf_folder()
    return [*words] if folder is None else [f"{_OPTION}={folder}", *words]


def is_found(folder: Path) -> bool:
    """Tell whether commands find a folder of YAML without being told."""
    try:
        found = conf_folder()
    except ConfigError:  # where another one was typed, nobody minds
        return False
    return found is not None and folder == Path(found).absolute()


def conf_folder() -> str | None:
    """Return the folder that pyproject.toml names, as it stands there; None: there is no such file, or it names none.

    Raises:
        ConfigError: as `with_conf` does.
    """
    try:
        found: Any = tomllib.loads(Path(_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(key=_FILE, happened=f"cannot be read: {error}", fix=f"mend it, or {_OPTION}=FOLDER") from None
    table = found.get("tool", {}).get("ddp_train")
    if table is None:
        return None
    unknown = sorted(set(table) - {"conf"})
    if unknown or not isinstance(table.get("conf"), str):
        is_close = bool(unknown) and bool(nearest(unknown[0], ["conf"]))
        raise ConfigError(
            key=f"{_FILE}: tool.ddp_train",
            happened=f"has {unknown[0]!r}" if unknown else f"has conf = {table.get('conf')!r}",
            expected="one key, conf: the folder with YAML in folders named after groups",
            fix=f"did you mean conf = {table[unknown[0]]!r}?" if is_close else 'conf = "conf"',
        )
    folder = str(table["conf"])
    if not Path(folder).is_dir():
        raise ConfigError(
            key=f"{_FILE}: tool.ddp_train.conf", happened=f"names {folder!r}, and there is no such folder here", fix=f"mkdir {folder}"
        )
    return folder
