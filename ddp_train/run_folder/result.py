"""result.json: how a run ended, its last step and its metrics. All reading and writing of it is here."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict

from ddp_train.errors import INTERRUPTED, PREEMPTED
from ddp_train.system.files import write_json
from ddp_train.traits import Goal

_OPTIONAL = ("headline", "error", "early_end", "goodput", "has_no_progress")


class Status(StrEnum):
    """The status of a run. The first two are for jobs of a sweep alone: a run has no result.json before it ends."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    PREEMPTED = "preempted"  # stopped in good order, by any signal but Ctrl-C or because its time was up
    INTERRUPTED = "interrupted"  # stopped in good order by Ctrl-C


EXIT_CODE_OF_STOP = {Status.INTERRUPTED: INTERRUPTED, Status.PREEMPTED: PREEMPTED}  # the ways to stop in good order -> the exit code


def status_of(number: int) -> Status:
    """Return the status of a run that a signal stopped."""
    return Status.INTERRUPTED if number == signal.SIGINT else Status.PREEMPTED


class Headline(TypedDict, total=False):
    """The metric to compare runs by."""

    metric: str
    goal: Goal


@dataclass(frozen=True, kw_only=True)
class Result:
    """The content of result.json. None: not known, or the run did not get so far."""

    status: Status
    step: int | None = None  # steps taken
    epoch: float | None = None  # None also for data that has no epochs
    samples: int | None = None
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # last: name -> value; best: name -> its value and step
    headline: Headline | None = None
    seconds: float | None = None
    error: str | None = None
    has_no_progress: bool = False  # it was started again and again without getting further
    goodput: Mapping[str, float] | None = None  # what the time since the first start was for (`run_folder.times`)
    early_end: str | None = None  # completed before its last step: by which callback, and why

    @property
    def last(self) -> Mapping[str, Any]:
        return (self.metrics or {}).get("last", {})

    def write(self, path: Path) -> None:
        """Write result.json, without the fields in `_OPTIONAL` that are None or False."""
        write_json(path, {name: value for name, value in vars(self).items() if name not in _OPTIONAL or value not in (None, False)})

    @classmethod
    def read(cls, path: Path) -> Result | None:
        """Read result.json; None: it is missing, damaged or of another form."""
        try:
            content = json.loads(path.read_text())
            values = {entry.name: content[entry.name] for entry in fields(cls) if entry.name in content}
            result = cls(**values | {"status": Status(content.get("status"))})
        except (OSError, ValueError, AttributeError):  # AttributeError: it is no object
            return None
        metrics = result.metrics or {}
        headline = result.headline or {"metric": "", "goal": "max"}
        has_forms = isinstance(metrics, dict) and isinstance(headline, dict) and {"metric", "goal"} <= headline.keys()
        return result if has_forms else None
