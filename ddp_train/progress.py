"""Whether a run that fails and starts again gets anywhere. If it does not, it is not started again: exit code 93.

attempts.json in the run folder has the failures since the run last got further, so that they count however it is started again: by an
agent, by a scheduler, by a script. `logs/steps_taken` says how far rank 0 was, also when it was killed.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ddp_train.exit_code import FINAL, NO_PROGRESS
from ddp_train.pulse import Listener, Phase
from ddp_train.run_dir import RunDir, write_json

_RESTARTS = 3  # in a row without progress
_SHOWN = 100  # characters of an error


@dataclass
class _Attempts:
    """What attempts.json holds."""

    furthest: int = 0  # the most steps that any attempt had taken
    checkpoint: int = 0  # the newest checkpoint's step
    is_open: bool = False  # an attempt has begun, and nobody has said how it ended
    began: float = 0.0  # when the last one did; seconds since the epoch
    failures: list[str] = field(default_factory=list)  # since the run last got further


def begin(run_dir: RunDir) -> Listener:
    """Note that an attempt begins, and return what notes the steps that it takes (rank 0)."""
    with suppress(OSError):  # a full disk: the attempt will say so itself
        attempts = _load(run_dir)
        attempts.is_open, attempts.began = True, time.time()
        write_json(run_dir.attempts, asdict(attempts))
        run_dir.steps_taken.unlink(missing_ok=True)
    descriptor: int | None = None

    def note(phase: Phase, step: int) -> None:
        nonlocal descriptor
        with suppress(OSError):
            if phase is Phase.STEP:
                if descriptor is None:
                    descriptor = os.open(run_dir.steps_taken, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
                os.pwrite(descriptor, b"%d" % step, 0)  # a microsecond or two
            elif phase is Phase.END and descriptor is not None:
                os.close(descriptor)
                descriptor = None

    return note


def end(run_dir: RunDir, *, is_saved: bool = True) -> None:
    """Note that the attempt has ended in good order: completed, or stopped (rank 0).

    Args:
        is_saved: it got somewhere; otherwise the failures before it still count.
    """
    attempts = _load(run_dir)
    attempts.is_open = False
    if is_saved or not attempts.failures:
        forget(run_dir)
    else:
        write_json(run_dir.attempts, asdict(attempts))


def forget(run_dir: RunDir) -> None:
    """Begin to count anew."""
    run_dir.attempts.unlink(missing_ok=True)
    run_dir.steps_taken.unlink(missing_ok=True)


def settle(run_dir: RunDir, *, has_failed: bool = False) -> str:
    """Count the attempt before this moment if it failed, and return the verdict when there is no progress; else "".

    The verdict is given once: whoever starts the run again after it has mended something, and the count begins anew. result.json says
    `failed`.

    Args:
        has_failed: the caller knows that it failed. Otherwise it did when it has begun, and nobody has said how it ended.
    """
    attempts = _load(run_dir)
    if not has_failed and not attempts.is_open:
        return ""
    attempts.is_open = False
    report = _report(run_dir, since=attempts.began)
    if report.get("exit_code") in FINAL:  # nobody starts it again, but a person who has mended it
        end(run_dir, is_saved=False)
        return ""
    steps_taken, checkpoint = _steps_taken(run_dir), max(run_dir.saved_steps(), default=0)
    if steps_taken > attempts.furthest or checkpoint > attempts.checkpoint:
        attempts.failures.clear()
    attempts.furthest, attempts.checkpoint = max(attempts.furthest, steps_taken), checkpoint
    attempts.failures.append(f"after step {steps_taken}: {_what_happened(report)}")
    if len(attempts.failures) <= _RESTARTS:
        with suppress(OSError):  # a full disk
            write_json(run_dir.attempts, asdict(attempts))
        return ""
    forget(run_dir)
    with suppress(OSError):
        facts: dict[str, Any] = {"step": steps_taken, "epoch": None, "samples": None, "metrics": {}, "seconds": None}
        write_json(run_dir.result, {"status": "failed", **facts, "error": f"NoProgress: {attempts.failures[-1]}"})
    return _verdict(run_dir, attempts)


def _verdict(run_dir: RunDir, attempts: _Attempts) -> str:
    place = f"its checkpoint of step {attempts.checkpoint}" if attempts.checkpoint else "the start"
    lines = [
        "",
        f"No progress: the run was started again {_RESTARTS} times from {place}, and never got beyond step {attempts.furthest}",
        "",
        *(f"  {number}  {line}" for number, line in enumerate(attempts.failures, 1)),
        "",
        f"  reports  {run_dir.shown()}/failure*.json",
        f"  fix: mend it before it runs again (exit code {NO_PROGRESS}: do not requeue);"
        f" `ddp-train resume {shlex.quote(run_dir.shown())}` counts anew",
        "",
    ]
    return "\n".join(lines)


def _report(run_dir: RunDir, *, since: float) -> dict[str, Any]:
    """Return the report of the last attempt, which may have made way already (failure.1.json ...); {} when it left none."""
    reports: list[dict[str, Any]] = [{"time": 0.0}]
    for path in run_dir.root.glob("failure*.json"):
        with suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    newest = max(reports, key=lambda report: float(report["time"]))
    return newest if newest["time"] > since else {}


def _what_happened(report: Mapping[str, Any]) -> str:
    if not report:
        return "everything ended without a report"
    text = " ".join(f"{report['error']}: {report['message']}".split())
    return f"rank {report['rank']} on {report['host']}, {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'}"


def _steps_taken(run_dir: RunDir) -> int:
    try:
        return int(run_dir.steps_taken.read_text())
    except (OSError, ValueError):
        return 0


def _load(run_dir: RunDir) -> _Attempts:
    try:
        return _Attempts(**json.loads(run_dir.attempts.read_text()))
    except (OSError, ValueError, TypeError):
        return _Attempts()
