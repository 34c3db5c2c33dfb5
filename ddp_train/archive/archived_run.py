"""One run, read from its folder. A damaged or missing file is one of its problems and never an error: old runs are of all kinds."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddp_train.checkpoint.catalog import CatalogEntry, saved_checkpoints
from ddp_train.checkpoint.manifest import rank_file
from ddp_train.config.run_config import ANSWERED
from ddp_train.config.schema import SECTIONS
from ddp_train.errors import ConfigError, UserError, one_line
from ddp_train.launch.captured_code import CodeFolder
from ddp_train.launch.engine.engine import Stage, State, submitted_state
from ddp_train.model_log import values_of
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Headline, Result, Status
from ddp_train.run_folder.sweep import Sweep, sweep_of
from ddp_train.system.files import json_lines
from ddp_train.system.folder_lock import is_locked

if TYPE_CHECKING:
    from ddp_train.archive.compare import Comparison

BROKEN = "broken"
"""The status of a run of which a file is damaged, or that another version has written: `ArchivedRun.problems` says what is wrong."""

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is six times as fast
BAD_FILE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, yaml.YAMLError)


class ArchivedRun:
    """What a run has left in its folder. Files are read when they are asked for, once; `status` is asked anew each time."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, RunFolder(root)
        self.answered: list[str] = []  # the keys of `config` that were `auto`
        self._damaged: dict[str, str] = {}  # file -> what is wrong with it

    def __repr__(self) -> str:
        return f"ArchivedRun({self.folder.as_typed()!r}: {self.status})"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.yaml, with the answers of its `auto`s; {}: it cannot be read."""
        try:
            tree = yaml.load(self.folder.config.read_text(), Loader=_YAML)
            json.dumps(tree, default=str)  # ValueError: an alias of what it is in
        except BAD_FILE as error:
            return self._note(self.folder.config, error)
        if not isinstance(tree, dict):
            return self._note(self.folder.config, "holds no configuration")
        if missing := [section for section in SECTIONS if section not in tree]:
            self._note(self.folder.config, f"has no section {', '.join(missing)}: another version of ddp_train wrote it")
        self.answered = list(tree.pop(ANSWERED, None) or [])
        return tree

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json; {}: the run has not begun, or it cannot be read."""
        return self._json(self.folder.environment)

    @cached_property
    def code(self) -> list[CodeFolder]:
        """The folders with its code, as code.json has them; []: it ended before that was written, or it cannot be used."""
        with suppress(TypeError, ValueError):  # another version has written it, or it was made to deceive
            return [CodeFolder(**folder) for folder in self._json(self.folder.code_list).get("folders", [])]
        return []

    @property
    def commit(self) -> str:
        """The commit that it was started from, with a word on changes; "": not known, or no repository."""
        return "".join(f"{code.commit}{', with changes: code.tar.gz' if code.changed else ''}" for code in self.code[:1] if code.commit)

    @cached_property
    def result(self) -> Result | None:
        """The content of result.json; None: the run has not ended, or it cannot be read."""
        result = self.folder.read_result()
        if result is None and self._json(self.folder.result):
            self._note(self.folder.result, "has no status that this version knows, or is of another form")
        return result

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What people have written to the run, {"tags": [...], "note": text}, and `reproduce`: {"reproduces": folder of the first run}."""
        return self._json(self.folder.notes)

    @property
    def reproduces(self) -> str | None:
        """The folder or bundle of the run that this one repeats (`ddp-train reproduce`): it is no result of its own; None: it is a run."""
        return self.notes.get("reproduces")

    @cached_property
    def overrides(self) -> list[str]:
        return [str(text) for text in self.environment.get("overrides") or []]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, in order. A value that was not finite is None."""
        return [row for row in json_lines(self.folder.metrics) if isinstance(row.get("step"), int) and isinstance(row.get("split"), str)]

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The rows of events.jsonl: spikes, skipped steps, rewinds, slow ranks."""
        return [*json_lines(self.folder.events)]

    @cached_property
    def checkpoints(self) -> list[CatalogEntry]:
        return saved_checkpoints(self.folder.checkpoints)

    @cached_property
    def data_identity(self) -> dict[str, Any]:
        """The identity of the data in the newest checkpoint, flat: order, sizes and hashes, meaning of the numbers; {}: there is none."""
        try:  # a file of tensors begins with the length of its head, and the head has the place of the plain state
            with (self.checkpoints[-1].path / rank_file(0)).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                begin, end = json.loads(file.read(length))["shared"]["data_offsets"]
                file.seek(8 + length + begin)
                identity = json.loads(file.read(end - begin))["data_identity"]
            return {f"{part}: {name}": value for part, values in identity.items() for name, value in values.items()}
        except (*BAD_FILE, MemoryError):
            return {}

    @cached_property
    def sweep(self) -> Path | None:
        """The folder of the sweep that the run is a job of."""
        with suppress(ConfigError):  # a damaged sweep.json
            return sweep_of(self.root.absolute())
        return None

    @cached_property
    def headline(self) -> Headline:
        """The metric by which the run is compared with others, and its goal: {"metric": "eval/accuracy", "goal": "max"}."""
        if self.result is not None and self.result.headline:
            return self.result.headline
        ranking = next((entry.ranking for entry in reversed(self.checkpoints) if entry.ranking is not None), None)
        return {"metric": ranking.metric, "goal": ranking.goal} if ranking is not None else {"metric": "train/loss", "goal": "min"}

    @cached_property
    def last(self) -> dict[str, Any]:
        """The newest value of each metric, as `eval/accuracy`."""
        if self.result is not None and self.result.last:
            return dict(self.result.last)
        return {name: value for row in self.metrics for name, value in values_of(row).items()}

    @cached_property
    def best(self) -> dict[str, dict[str, Any]]:
        """The best value of each metric that has a goal, and its step: {"eval/accuracy": {"value": 0.9, "step": 100}}."""
        if self.result is not None and self.result.metrics.get("best"):
            return dict(self.result.metrics["best"])
        name, sign = self.headline["metric"], 1 if self.headline["goal"] == "max" else -1
        value, step = max(((sign * value, -step) for step, value in self.curve(name) if value is not None), default=(0.0, None))
        return {name: {"value": sign * value, "step": -step}} if step is not None else {}

    @property
    def step(self) -> int | None:
        """The last step that is known of the run: a killed one has written none into result.json; None: it has no record."""
        if self.result is not None and self.result.step is not None:
            return self.result.step
        return max((row["step"] for row in self.metrics), default=None)

    @cached_property
    def started(self) -> float | None:
        """When the run began, in seconds since the epoch, or when it was made, if it has not."""
        with suppress(ValueError, TypeError, KeyError):
            return datetime.fromisoformat(self.environment["started"]).timestamp()
        with suppress(OSError):
            return self.folder.config.stat().st_mtime
        return None

    def curve(self, metric: str) -> list[tuple[int, float | None]]:
        """Return a metric's values by step; None for one that was not finite."""
        split, _, name = metric.partition("/")
        points = ((row["step"], row[name]) for row in self.metrics if row["split"] == split and name in row)
        return [(step, float(value) if isinstance(value, (int, float)) else None) for step, value in points]

    def compare(self, *others: ArchivedRun) -> Comparison:
        """Compare this run with others in configuration, code, data, environment and results."""
        from ddp_train.archive.compare import compare

        return compare([self, *others])

    @property
    def problems(self) -> list[str]:
        """The damaged and missing files of the folder, a line for each."""
        _ = self.config, self.environment, self.result, self.notes
        return [f"{file} {why}" for file, why in self._damaged.items()]

    @property
    def recorded_status(self) -> str:
        """How the run is by its files alone."""
        if self.problems:
            return BROKEN
        if self.result is not None:
            return self.result.status
        return Status.INTERRUPTED if self.environment or self.folder.logs.exists() else Status.QUEUED

    @property
    def status(self) -> str:
        """How the run is, in the words of result.json, or `BROKEN`; queued and running as locks, its sweep and engines say it now."""
        in_sweep = sweep_statuses(self.sweep).get(self.root.absolute()) if self.sweep is not None else None
        return live_status(self.folder, self.recorded_status, in_sweep=in_sweep)

    def _repr_html_(self) -> str:
        from ddp_train.archive.report.figures import figure_of

        head = f"<b>{escape(self.folder.as_typed())}</b> {self.status}, step {self.step or 0}<br>{escape(' '.join(self.overrides))}<br>"
        return head + " ".join(figure_of(name, {"": [self.curve(name)]}) for name in dict.fromkeys((self.headline["metric"], "train/loss")))

    def _json(self, file: Path) -> dict[str, Any]:
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:
            return {}
        except BAD_FILE as error:
            return self._note(file, error)
        return content if isinstance(content, dict) else self._note(file, "holds no JSON object")

    def _note(self, file: Path, why: str | Exception) -> dict[str, Any]:
        if isinstance(why, Exception):
            reason = why.strerror if isinstance(why, OSError) else one_line(str(why), 100)
            why = "is missing" if isinstance(why, FileNotFoundError) else f"cannot be read: {reason}"
        self._damaged[file.name] = why
        return {}


def live_status(run_folder: RunFolder, recorded: str, *, in_sweep: str | None) -> str:
    """Return the status of a run; `recorded`: by its files; `in_sweep`: by the process that works in the run's sweep now."""
    if is_locked(run_folder.root):
        return Status.RUNNING
    if in_sweep in (Status.QUEUED, Status.RUNNING):
        return in_sweep
    if recorded in (Status.QUEUED, Status.INTERRUPTED):
        with suppress(UserError, TypeError, OSError):  # a damaged file of a submission
            state = submitted_state(run_folder)
            return Status(state.stage) if isinstance(state, State) and state.stage is not Stage.ENDED else recorded
    return recorded


def sweep_statuses(sweep: Path) -> dict[Path, str]:
    """Return the status of each job of a sweep that a process works in now, by its folder; {}: none does."""
    with suppress(ConfigError):  # a damaged sweep.json
        return {sweep / job.folder: job.status for job in Sweep.load(sweep).jobs} if is_locked(sweep) else {}
    return {}


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None: it cannot be read."""
    with suppress(*BAD_FILE):
        return yaml.load(path.read_text(), Loader=_YAML)
    return None


def size_of(folder: Path) -> int:
    """Return the bytes that a folder takes on disk."""
    total = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):  # it was removed just now
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
