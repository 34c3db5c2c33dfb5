"""Notes from one attempt to the next: the number of starts without a new checkpoint, and on each machine the run's folder.

starts.json in the run folder counts the starts by an agent, a scheduler or a script. After `MAX_STARTS_WITHOUT_CHECKPOINT` without a new
checkpoint the run is not started again: exit code 93. Two kinds of attempts are not counted: one with a mistake that a person has to fix,
and one that was stopped before it could save, unless an engine made it: the engine would start the run again for ever.

torchrun starts new processes after a failure and tells them nothing. The agent, each rank's parent process, lives as long as the run; or,
if each agent serves one attempt (`launch/node/`), the node program does. A small file named after that process holds the folder, in a
directory for temporary files that belongs to this user alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddp_train.errors import FINAL, NO_PROGRESS
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system import handover
from ddp_train.system.files import write_json
from ddp_train.system.process import pid_namespace, start_of
from ddp_train.system.torchrun_env import restart_count

STARTED = time.time()  # when this process began, in seconds since the epoch; about: when this module was imported
MAX_STARTS_WITHOUT_CHECKPOINT = 4
NO_PROGRESS_ERROR = "NoProgress"  # the error in result.json begins so after the last of them
_SHOWN = 100  # characters of an error
_ENGINE, _TAKEN, _RANKS = "engine", "ranks of an engine", "ranks"


@dataclass
class _Starts:
    """The content of starts.json."""

    checkpoint: int = 0  # step of the newest one
    began: list[float] = field(default_factory=list)  # times of the attempts without a newer one, in seconds since the epoch
    open: str = ""  # what has counted the attempt that has not ended yet

    def write(self, run_folder: RunFolder) -> None:
        if self.began:
            write_json(run_folder.starts, asdict(self))
        else:
            run_folder.starts.unlink(missing_ok=True)


def count_attempt(run_folder: RunFolder, *, by_engine: bool = False) -> None:
    """Count an attempt. Rank 0 calls this at its begin; under an engine the program that starts the machines has counted it before.

    Args:
        by_engine: also move away the result and report of earlier attempts: later ones are of this one.
    """
    if by_engine:
        run_folder.forget_failure()
    starts = _load(run_folder)
    if not by_engine and starts.open == _ENGINE:
        starts.open = _TAKEN
    else:
        starts.began.append(time.time())
        starts.open = _ENGINE if by_engine else _RANKS
    starts.write(run_folder)


def end_attempt(run_folder: RunFolder, *, is_saved: bool = True) -> None:
    """Record that the attempt has completed, or stopped in good order (rank 0). Unless it has saved, earlier ones still count."""
    starts = _load(run_folder)
    if is_saved:
        starts.began.clear()
    elif starts.open == _RANKS:
        starts.began.pop()
    starts.open = ""
    starts.write(run_folder)


def prepare_start(run_folder: RunFolder, *, from_checkpoint: bool) -> str:
    """Prepare the start of a run by a command, and return why it must not begin; "": it may.

    `from_checkpoint`: a person has chosen the checkpoint to continue from, so that the count begins anew.
    """
    if not from_checkpoint:
        return close_last_attempt(run_folder)
    run_folder.starts.unlink(missing_ok=True)
    return ""


def close_last_attempt(run_folder: RunFolder, *, has_failed: bool = False, by_engine: bool = False) -> str:
    """Record that the last attempt has ended, and return why the run is not to be started again; "": it may be.

    The reason comes once, with `failed` in result.json; then the count begins anew, for a person who has fixed the cause.

    Args:
        has_failed: the caller knows that the attempt has failed. Otherwise it has failed if no process has recorded its end.
        by_engine: the program that starts the machines asks; an attempt that it has counted is over as well.
    """
    starts = _load(run_folder)
    if not has_failed and not by_engine and starts.open in ("", _ENGINE):
        return ""
    files = run_folder.root.glob("failure*.json")  # of all attempts: failure.json, failure.1.json ...
    reports = sorted(filter(None, map(failure.load, files)), key=lambda report: report.time)
    report = reports[-1] if reports and (not starts.began or reports[-1].time >= starts.began[-1]) else None
    if has_failed and not starts.open:  # it failed before rank 0 could count
        starts.began.append(report.time if report else time.time())
    starts.open = ""
    if report is not None and report.exit_code in FINAL and starts.began:  # only a person starts it again
        starts.began.pop()
    if len(starts.began) < MAX_STARTS_WITHOUT_CHECKPOINT:
        with suppress(OSError):  # a full disk
            starts.write(run_folder)
        return ""
    lines = []
    for began, next_began in zip(starts.began, [*starts.began[1:], float("inf")], strict=True):
        report = next((report for report in reports if began <= report.time < next_began), None)
        after = "" if report is None or report.step is None else f"after step {report.step}: "
        lines.append(f"{after}{report.who}: {report.line(_SHOWN)}" if report else "everything ended without a report")
    run_folder.starts.unlink(missing_ok=True)  # the count begins anew
    result = Result(status=Status.FAILED, step=report.step if report else None, error=f"{NO_PROGRESS_ERROR}: {lines[-1]}")
    with suppress(OSError):
        result.write(run_folder.result)
    origin = f"its checkpoint of step {starts.checkpoint}" if starts.checkpoint else "the start"
    head = f"No progress: the run was started again {len(lines) - 1} times from {origin}, and no new checkpoint came of it"
    numbered = [f"  {number}  {line}" for number, line in enumerate(lines, 1)]
    fix = f"  fix: mend it before it runs again (exit code {NO_PROGRESS}: do not requeue); `{run_folder.resume_command()}` counts anew"
    return "\n".join(["", head, "", *numbered, "", f"  reports  {run_folder.as_typed()}/failure*.json", fix, ""])


def _load(run_folder: RunFolder) -> _Starts:
    try:
        starts = _Starts(**json.loads(run_folder.starts.read_text()))
    except (OSError, ValueError, TypeError):
        starts = _Starts()
    newest = max(run_folder.saved_steps(), default=0)
    return starts if starts.checkpoint == newest else _Starts(checkpoint=newest, began=starts.began[-1:], open=starts.open)


@dataclass(frozen=True, kw_only=True)
class RestartNote:
    """The note of an earlier attempt."""

    folder: Path
    restarts: int  # restarts of the ranks on this machine when it was written
    started: float  # when the first attempt began, in seconds since the epoch


def remember_run(folder: Path, *, owner: int | None = None) -> None:
    """Note a folder for later attempts: a run folder, the checkpoint to begin with, or a sweep's folder.

    Every rank may call it; those of one machine write the same. `owner`: the process that outlives the ranks, if no rank calls this.
    """
    started = run_started()
    try:
        file = _file_of(owner)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as stream:
            json.dump({"folder": str(folder), "restarts": restart_count(), "started": started}, stream)
        temporary.replace(file)
    except OSError as error:
        print(f"a restart would begin a new run, because this one cannot be noted in {tempfile.gettempdir()}: {error}", file=sys.stderr)


def recall_run(*, owner: int | None = None) -> RestartNote | None:
    """Return the note of an earlier attempt on this node."""
    with suppress(OSError):
        note = json.loads(_file_of(owner).read_text(encoding="utf-8"))
        return RestartNote(folder=Path(note["folder"]), restarts=note["restarts"], started=note["started"])
    return None


def run_started() -> float:
    """Return when the command of this rank's run was typed, from the launcher; under a user's torchrun, when the first attempt began."""
    if handover.STARTED in os.environ:
        return float(os.environ[handover.STARTED])
    earlier = recall_run()
    return earlier.started if earlier is not None else STARTED


def forget_run() -> None:
    """Remove the note: the run has ended well."""
    with suppress(OSError):
        _file_of().unlink()


def _file_of(owner: int | None = None) -> Path:
    """Return the file of a process that outlives the ranks, after removing files of ended processes."""
    owner = owner or int(os.environ.get(handover.NODE) or os.getppid())
    folder = Path(tempfile.gettempdir()) / f"ddp_train_{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} is not a folder of yours alone")  # another user's note could lead us to any folder
    here = f"{socket.gethostname()}_{pid_namespace()}"  # containers may share a temporary directory, and each counts its processes from 1
    for file in folder.glob(f"{here}_*"):
        pid, _, start = file.name.removeprefix(f"{here}_").partition("_")
        if pid.isdigit() and start_of(int(pid)) != start:
            file.unlink(missing_ok=True)
    return folder / f"{here}_{owner}_{start_of(owner)}"
