"""Whether a run that fails and starts again gets anywhere. If it does not, it is not started again: exit code 93.

attempts.json in the run folder has the failures since the run last got further, so that they count however it is started again: by an
agent, by a scheduler, by a script. `logs/steps_taken` says how far rank 0 was: exactly after an error, to a second when it was killed.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread

from ddp_train.errors import FINAL, NO_PROGRESS
from ddp_train.phase import Phase
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.files import write_json

NO_PROGRESS_ERROR = "NoProgress"
"""How the error in result.json begins after the verdict."""

_RESTARTS = 3  # in a row without progress
_NOTE_EVERY_S = 1.0
_FIRST_NOTE_S = 0.05  # after the first step has begun; each wait is twice as long as the one before
_SHOWN = 100  # characters of an error


@dataclass
class _Attempts:
    """What attempts.json holds."""

    furthest: int = 0  # the most steps that any attempt can have taken
    checkpoint: int = 0  # the newest checkpoint's step
    is_open: bool = False  # an attempt has begun, and nobody has said how it ended
    began: float = 0.0  # when the last one did; seconds since the epoch
    failures: list[str] = field(default_factory=list)  # since the run last got further


class Notes:
    """Writes into the run folder how many steps the attempt at hand has taken. A listener of rank 0's phase tracker.

    A thread of its own writes, once a second: the folder may be on a network, where a write in each step would be slower than the step.
    A kill may so come up to a second after the last note. The file therefore holds two numbers, how far the attempt was at least and
    how far it can have been at most: a run that always dies at the same step must not look as if it got a little further each time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken = self._noted = 0
        self._most_between_notes = 0
        self._descriptor: int | None = None
        self._is_over = Event()
        self._thread: Thread | None = None

    def __call__(self, phase: Phase, step: int) -> None:
        """Take note of a phase."""
        if step > self._taken:  # else a rewind: how far it ever was counts
            self._taken = step
        if self._thread is None and phase is not Phase.START:
            self._noted = step
            self._thread = Thread(target=self._follow, name="step-notes", daemon=True)
            self._thread.start()
        if phase is Phase.END:
            self.close()

    def note(self) -> None:
        """Write down how far the attempt is."""
        taken = self._taken
        self._most_between_notes = max(self._most_between_notes, taken - self._noted)
        self._noted = taken
        # Thrice as many as were ever taken between two notes, for a note that comes late; slow steps are noted one by one.
        self._write(taken, at_most=taken + 3 * max(0, self._most_between_notes - 1))

    def close(self) -> None:
        """Write down the last step, and end the thread."""
        if self._thread is None or self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self._write(self._taken, at_most=self._taken)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _follow(self) -> None:
        wait_s = _FIRST_NOTE_S
        while not self._is_over.wait(wait_s):
            if self._taken != self._noted:
                self.note()
            wait_s = min(2 * wait_s, _NOTE_EVERY_S)

    def _write(self, taken: int, *, at_most: int) -> None:
        with suppress(OSError):  # a full disk: the attempt will say so itself
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
            os.pwrite(self._descriptor, f"{taken:<20}{at_most:<20}\n".encode(), 0)  # always as long: no rest of an earlier one


def begin(run_folder: RunFolder) -> Notes:
    """Note that an attempt begins, and return what notes the steps that it takes (rank 0)."""
    with suppress(OSError):  # a full disk: the attempt will say so itself
        attempts = _load(run_folder)
        attempts.is_open, attempts.began = True, time.time()
        write_json(run_folder.attempts, asdict(attempts))
        run_folder.steps_taken.unlink(missing_ok=True)
    return Notes(run_folder.steps_taken)


def end(run_folder: RunFolder, *, is_saved: bool = True) -> None:
    """Note that the attempt has ended in good order: completed, or stopped (rank 0).

    Args:
        is_saved: it got somewhere; otherwise the failures before it still count.
    """
    attempts = _load(run_folder)
    attempts.is_open = False
    if is_saved or not attempts.failures:
        forget(run_folder)
    else:
        write_json(run_folder.attempts, asdict(attempts))


def forget(run_folder: RunFolder) -> None:
    """Begin to count anew."""
    run_folder.attempts.unlink(missing_ok=True)
    run_folder.steps_taken.unlink(missing_ok=True)


def count_failure(run_folder: RunFolder, *, has_failed: bool = False) -> str:
    """Count the attempt before this moment if it failed, and return the verdict when there is no progress; else "".

    The verdict is given once: whoever starts the run again after it has mended something, and the count begins anew. result.json says
    `failed`.

    Args:
        has_failed: the caller knows that it failed. Otherwise it did when it has begun, and nobody has said how it ended.
    """
    attempts = _load(run_folder)
    if not has_failed and not attempts.is_open:
        return ""
    attempts.is_open = False
    report = failure.newest(run_folder)
    if report and report.time <= attempts.began:  # of an attempt before
        report = None
    if report and report.exit_code in FINAL:  # nobody starts it again, but a person who has mended it
        end(run_folder, is_saved=False)
        return ""
    (taken, at_most), checkpoint = steps_taken(run_folder), max(run_folder.saved_steps(), default=0)
    if taken > attempts.furthest or checkpoint > attempts.checkpoint:
        attempts.failures.clear()
    attempts.furthest, attempts.checkpoint = max(attempts.furthest, at_most), checkpoint
    where = f"step {taken}" if at_most == taken else f"step {taken} to {at_most}"
    what = f"rank {report.rank} on {report.host}, {report.line(_SHOWN)}" if report else "everything ended without a report"
    attempts.failures.append(f"after {where}: {what}")
    if len(attempts.failures) <= _RESTARTS:
        with suppress(OSError):  # a full disk
            write_json(run_folder.attempts, asdict(attempts))
        return ""
    forget(run_folder)
    with suppress(OSError):
        Result(status=Status.FAILED, step=taken, error=f"{NO_PROGRESS_ERROR}: {attempts.failures[-1]}").write(run_folder.result)
    return _verdict(run_folder, attempts)


def steps_taken(run_folder: RunFolder) -> tuple[int, int]:
    """Return how many steps the last attempt has taken at least, and at most."""
    try:
        at_least, at_most = run_folder.steps_taken.read_text().split()
        return int(at_least), int(at_most)
    except (OSError, ValueError):
        return 0, 0


def _verdict(run_folder: RunFolder, attempts: _Attempts) -> str:
    place = f"its checkpoint of step {attempts.checkpoint}" if attempts.checkpoint else "the start"
    lines = [
        "",
        f"No progress: the run was started again {_RESTARTS} times from {place}, and never got beyond step {attempts.furthest}",
        "",
        *(f"  {number}  {line}" for number, line in enumerate(attempts.failures, 1)),
        "",
        f"  reports  {run_folder.shown()}/failure*.json",
        f"  fix: mend it before it runs again (exit code {NO_PROGRESS}: do not requeue);"
        f" `ddp-train resume {shlex.quote(run_folder.shown())}` counts anew",
        "",
    ]
    return "\n".join(lines)


def _load(run_folder: RunFolder) -> _Attempts:
    try:
        return _Attempts(**json.loads(run_folder.attempts.read_text()))
    except (OSError, ValueError, TypeError):
        return _Attempts()
