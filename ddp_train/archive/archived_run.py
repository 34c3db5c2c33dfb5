"""One run, read from its folder. A damaged or missing file is one of its problems and never an error: old runs are of all kinds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ddp_train.checkpoint.catalog import CatalogEntry, saved_checkpoints
from ddp_train.checkpoint.manifest import Ranking
from ddp_train.config.run_config import ANSWERED
from ddp_train.config.schema import SECTIONS
from ddp_train.errors import ConfigError, UserError
from ddp_train.launch.engine.engine import Stage, Submission
from ddp_train.metrics.jsonl import read_records
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.sweep import Sweep, sweep_of
from ddp_train.system.folder_lock import is_held

BROKEN = "broken"
"""The status of a run of which a file is damaged, or that another version has written: `ArchivedRun.problems` says what is wrong."""

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is six times as fast
_LOSS = Ranking(metric="train/loss", goal="min")


class ArchivedRun:
    """What a run has left in its folder. Files are read when they are asked for, once; `status` is asked anew each time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = RunFolder(root)
        self._damaged: dict[str, str] = {}  # file -> what is wrong with it

    def __repr__(self) -> str:
        return f"ArchivedRun({self.folder.as_typed()!r}: {self.status})"

    @property
    def name(self) -> str:
        """The folder as a person would type it."""
        return self.folder.as_typed()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.yaml, with the answers of its `auto`s; {}: it cannot be read."""
        try:
            tree = yaml.load(self.folder.config.read_bytes(), Loader=_YAML)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            return self._note("config.yaml", _why(error))
        if not isinstance(tree, dict):
            return self._note("config.yaml", "holds no configuration")
        if missing := [section for section in SECTIONS if section not in tree]:
            self._note("config.yaml", f"has no section {', '.join(missing)}: another version of ddp_train wrote it")
        self.answered = tree.pop(ANSWERED, None) or []
        return tree

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json; {}: the run has not begun, or it cannot be read."""
        return self._json("environment.json")

    @cached_property
    def result(self) -> Result | None:
        """The content of result.json; None: the run has not ended, or it cannot be read."""
        result = self.folder.read_result()
        if result is None and self._json("result.json"):
            self._note("result.json", "has no status that this version knows")
        return result

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What people have written to the run: {"tags": [...], "note": text}."""
        return self._json("notes.json")

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides that the run was started with."""
        return [str(text) for text in self.environment.get("overrides") or []]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, in order. A value that was not finite is None."""
        return list(read_records(self.root)) if self.folder.metrics.is_file() else []

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The rows of events.jsonl: spikes, skipped steps, rewinds, slow ranks."""
        return list(_lines(self.folder.events))

    @cached_property
    def times(self) -> list[dict[str, Any]]:
        """The rows of times.jsonl: where the time went, a head for each attempt."""
        return list(_lines(self.root / "times.jsonl"))

    @cached_property
    def checkpoints(self) -> list[CatalogEntry]:
        """The run's complete checkpoints, the oldest first."""
        return saved_checkpoints(self.folder.checkpoints)

    @cached_property
    def sweep(self) -> Path | None:
        """The folder of the sweep that the run is a job of."""
        try:
            return sweep_of(self.root.absolute())
        except ConfigError:  # a damaged sweep.json
            return None

    @cached_property
    def headline(self) -> dict[str, str]:
        """The metric by which the run is compared with others, and its goal: {"metric": "eval/accuracy", "goal": "max"}."""
        if self.result is not None and self.result.headline and {"metric", "goal"} <= set(self.result.headline):
            return {name: str(self.result.headline[name]) for name in ("metric", "goal")}
        ranking = next((entry.ranking for entry in reversed(self.checkpoints) if entry.ranking is not None), _LOSS)
        return asdict(ranking)

    @cached_property
    def last(self) -> dict[str, Any]:
        """The newest value of each metric, as `eval/accuracy`."""
        if self.result is not None and self.result.last:
            return dict(self.result.last)
        axes = ("split", "step", "epoch", "samples", "time")
        return {f"{row['split']}/{name}": value for row in self.metrics for name, value in row.items() if name not in axes}

    @cached_property
    def best(self) -> dict[str, dict[str, Any]]:
        """The best value of each metric that has a goal, and its step: {"eval/accuracy": {"value": 0.9, "step": 100}}."""
        if self.result is not None and self.result.metrics.get("best"):
            return {name: dict(best) for name, best in self.result.metrics["best"].items()}
        name, goal = self.headline["metric"], self.headline["goal"]
        curve = [(value if goal == "max" else -value, -step) for step, value in self.curve(name) if value is not None]
        if not curve:
            return {}
        value, step = max(curve)  # of equal ones the earlier
        return {name: {"value": value if goal == "max" else -value, "step": -step}}

    @property
    def step(self) -> int | None:
        """The steps that the run has taken; None: not known."""
        newest = self.metrics[-1]["step"] if self.result is None and self.metrics else None
        return self.result.step if self.result is not None else newest

    def curve(self, metric: str) -> list[tuple[int, float | None]]:
        """Return a metric's values by step; None for one that was not finite."""
        split, _, name = metric.partition("/")
        points = ((row["step"], row[name]) for row in self.metrics if row["split"] == split and name in row)
        return [(step, float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None) for step, value in points]

    @property
    def problems(self) -> list[str]:
        """What is damaged or missing in the folder, a line for each file."""
        for _ in (self.config, self.environment, self.result, self.notes):
            pass
        return [f"{file} {why}" for file, why in self._damaged.items()]

    @property
    def is_worked_in(self) -> bool:
        """Whether a process works on the run now: its own command, or that of its sweep."""
        return _is_held(self.root) or (self.sweep is not None and _is_held(self.sweep))

    @property
    def status(self) -> str:
        """How the run is, in the words of result.json; queued and running as locks and engines say it, or `BROKEN`."""
        if _is_held(self.root):
            return Status.RUNNING
        if self.sweep is not None and _is_held(self.sweep):
            job = next((job for job in Sweep.load(self.sweep).jobs if self.sweep / job.folder == self.root.absolute()), None)
            if job is not None and job.status in (Status.QUEUED, Status.RUNNING):
                return job.status
        if self.problems:
            return BROKEN
        if self.result is not None:
            return self.result.status
        if (stage := self.engine_stage()) not in (None, Stage.ENDED):
            return Status.QUEUED if stage is Stage.QUEUED else Status.RUNNING
        return Status.INTERRUPTED if self.environment or self.metrics else Status.QUEUED

    def engine_stage(self) -> Stage | None:
        """Return how far an engine is with the run; None: no engine has it, or it does not answer."""
        try:
            submission = Submission.read(self.folder)
            return submission.state(self.folder).stage if submission is not None else None
        except (UserError, TypeError, OSError):
            return None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.root / name).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            return self._note(name, _why(error))
        return content if isinstance(content, dict) else self._note(name, "holds no JSON object")

    def _note(self, file: str, why: str) -> dict[str, Any]:
        self._damaged[file] = why
        return {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, but for one that is cut."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    text = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return f"cannot be read: {text}"


def _is_held(folder: Path) -> bool:
    try:
        return is_held(folder)
    except OSError:
        return False
