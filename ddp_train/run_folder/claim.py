"""The exclusive claim to a run's folder."""

import contextlib
import shutil
from pathlib import Path

from ddp_train.errors import ConfigError
from ddp_train.system import folder_lock

_UNUSED_FILES = {"multirun.yaml", "conf"}  # in the folder of a sweep before its first job
_made_folders: list[Path] = []


def claim_new(wanted: Path) -> Path:
    """Create `wanted`, or `wanted_1`, `wanted_2`, ... and return it. `mkdir` is atomic: two runs started at once get two folders."""
    for number in range(10_000):
        folder = wanted if number == 0 else wanted.with_name(f"{wanted.name}_{number}")
        try:
            _make(folder)
        except FileExistsError:
            continue
        folder_lock.lock(folder, key="hydra.run.dir")
        return folder
    raise ConfigError(key="hydra.run.dir", happened=f"{wanted} and 9,999 numbered folders after it exist", fix="choose another name")


def claim_typed(folder: Path, *, key: str) -> Path:
    """Create the folder that the user named, or claim it if it is empty. ConfigError: it is not; nothing is overwritten."""
    with contextlib.suppress(FileExistsError):
        _make(folder)
    if folder.is_dir():
        folder_lock.lock(folder, key=key)
    require_empty(folder, key=key)
    return folder


def require_empty(folder: Path, *, key: str) -> None:
    """Refuse a folder that is not empty, or a path that is no folder (ConfigError)."""
    if not folder.is_dir() or any(path.name != folder_lock.HOLDER for path in folder.iterdir()):
        happened = f"{folder} exists and is not an empty folder"
        fix = f"another {key}, or `ddp-train resume {folder}` to continue a run"
        raise ConfigError(key=key, happened=happened, expected="a new or an empty folder; nothing is overwritten", fix=fix)


def give_up_claims() -> None:
    """Unlock every folder that this process has locked, and remove those that it made and that are still unused."""
    folder_lock.unlock_all()
    while _made_folders:
        folder = _made_folders.pop()
        with contextlib.suppress(OSError):
            if {path.name for path in folder.iterdir()} <= _UNUSED_FILES:
                shutil.rmtree(folder)


def clear(folder: Path) -> None:
    """Remove the content of a folder that this process has locked. `give_up_claims` then removes the folder if this process made it."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != folder_lock.HOLDER:
            path.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        _made_folders.append(folder)
    except FileExistsError:
        if not folder.parent.is_dir():
            raise ConfigError(key="hydra.run.dir", happened=f"{folder.parent} is not a folder") from None
        raise
    except OSError as error:
        happened = f"{folder} cannot be created: {error.strerror}"
        raise ConfigError(key="hydra.run.dir", happened=happened, fix="hydra.run.dir=FOLDER") from None
