"""What this node remembers from one attempt of a run to the next: the folder to continue.

torchrun starts new processes after a failure and tells them nothing. What lives as long as the run does is the agent, each rank's parent
process, or, where each agent serves one start of the ranks (`node/`), the node program: a small file named after it holds the folder, in a
folder of the temporary directory that belongs to this user alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_train.system import handover
from ddp_train.system.process import pid_namespace, start_of
from ddp_train.system.torchrun_env import restart_count

STARTED = time.time()
"""When this process began, in seconds since the epoch; about: when this module was imported."""


@dataclass(frozen=True, kw_only=True)
class RestartNote:
    """What an earlier attempt left for this one."""

    folder: Path
    restarts: int  # how often the ranks had been started again when it was written, as this node counts
    started: float  # when the first attempt began, in seconds since the epoch


def remember(folder: Path, *, owner: int | None = None) -> None:
    """Keep a folder for the attempts after this one: a run folder, the checkpoint to begin with, or a sweep's folder.

    Every rank may call it; those of one node write the same. `owner` is the process that outlives the ranks, where no rank calls it.
    """
    started = run_started()
    try:
        file = _file_of(owner or _owner())
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as stream:
            json.dump({"folder": str(folder), "restarts": restart_count(), "started": started}, stream)
        temporary.replace(file)
    except OSError as error:
        print(f"a restart would begin a new run, because this one cannot be noted in {tempfile.gettempdir()}: {error}", file=sys.stderr)


def recall(*, owner: int | None = None) -> RestartNote | None:
    """Return what an earlier attempt here remembered."""
    with contextlib.suppress(OSError):
        found = json.loads(_file_of(owner or _owner()).read_text(encoding="utf-8"))
        return RestartNote(folder=Path(found["folder"]), restarts=found["restarts"], started=found["started"])
    return None


def run_started() -> float:
    """Return when the command of this rank's run was typed: as the launcher says, or, under a user's torchrun, the first attempt began."""
    if handover.STARTED in os.environ:
        return float(os.environ[handover.STARTED])
    earlier = recall()
    return earlier.started if earlier is not None else STARTED


def has_failed(memory: RestartNote | None) -> bool:
    """Tell whether a failure here has started the ranks again, and not a machine that came or went."""
    return memory is not None and restart_count() > memory.restarts


def forget() -> None:
    """Remove what was remembered: the run has ended well."""
    with contextlib.suppress(OSError):
        _file_of(_owner()).unlink()


def _owner() -> int:
    return int(os.environ.get(handover.NODE) or os.getppid())


def _file_of(agent: int) -> Path:
    """Return the file of an agent, after removing those of agents that are gone."""
    folder = Path(tempfile.gettempdir()) / f"ddp_train_{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} is not a folder of yours alone")  # what another user writes there could send us anywhere
    here = f"{socket.gethostname()}_{pid_namespace()}"  # containers may share a temporary directory, and each counts its processes from 1
    for file in folder.glob(f"{here}_*"):
        pid, _, start = file.name.removeprefix(f"{here}_").partition("_")
        if pid.isdigit() and start_of(int(pid)) != start:
            file.unlink(missing_ok=True)
    return folder / f"{here}_{agent}_{start_of(agent)}"
