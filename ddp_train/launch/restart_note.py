"""A machine's note from one attempt of a run to the next: what that continues from.

torchrun starts new processes after a failure and tells them nothing. The agent, each rank's parent process, lives as long as the run; or,
if each agent serves one attempt (`launch/node/`), the node program does. A small file named after that process holds it, in a
directory for temporary files that belongs to this user alone.
"""

import json
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_train.system import process_env
from ddp_train.system.process import pid_namespace, start_of
from ddp_train.system.process_env import restart_count

STARTED = time.time()  # when this process began, in seconds since the epoch; about: when this module was imported


@dataclass(frozen=True, kw_only=True)
class RestartNote:
    continues_from: Path  # the run folder, the checkpoint that was named, or a sweep's folder
    restarts: int  # restarts of the ranks on this machine when it was written
    started: float  # when the first attempt began, in seconds since the epoch


def remember_run(continues_from: Path, *, owner: int | None = None) -> None:
    """Note what later attempts continue from (`RestartNote.continues_from`).

    Every rank may call it; those of one machine write the same. `owner`: the process that outlives the ranks, if no rank calls this.
    """
    started = run_started()
    try:
        file = _file_of(owner)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as stream:
            json.dump({"continues_from": str(continues_from), "restarts": restart_count(), "started": started}, stream)
        temporary.replace(file)
    except OSError as error:
        print(f"a restart would begin a new run, because {tempfile.gettempdir()} cannot hold a note of this one: {error}", file=sys.stderr)


def recall_run(*, owner: int | None = None) -> RestartNote | None:
    """Return the note of an earlier attempt on this node."""
    with suppress(OSError):
        note = json.loads(_file_of(owner).read_text(encoding="utf-8"))
        return RestartNote(continues_from=Path(note["continues_from"]), restarts=note["restarts"], started=note["started"])
    return None


def run_started() -> float:
    """Return when the command of this rank's run was typed, from the launcher; under a user's torchrun, when the first attempt began."""
    if process_env.STARTED in os.environ:
        return float(os.environ[process_env.STARTED])
    return earlier.started if (earlier := recall_run()) is not None else STARTED


def forget_run() -> None:
    """Remove the note: the run has ended well."""
    with suppress(OSError):
        _file_of().unlink()


def _file_of(owner: int | None = None) -> Path:
    """Return the file of a process that outlives the ranks; one whose number is given out again has another."""
    owner = owner or int(os.environ.get(process_env.NODE) or os.getppid())
    folder = Path(tempfile.gettempdir()) / f"ddp_train_{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} is not a folder of yours alone")  # another user's note could lead us to any folder
    # Containers may share a temporary directory, and each counts its processes from 1.
    return folder / f"{socket.gethostname()}_{pid_namespace()}_{owner}_{start_of(owner)}"
