"""What every engine offers: it renders its own files and commands, submits, says where a run is, stops it, and follows it.

An engine is a module of this folder with the name that `cluster.launcher` has for it (`ENGINES`); its `ENGINE` is an `Engine`.
"""

from __future__ import annotations

import importlib
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import cast

from ddp_train.config.cluster import ENGINES
from ddp_train.errors import ConfigError, DataError, EnvironmentRefuses, UserError
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import read_json, write_atomic, write_json
from ddp_train.system.folder_lock import is_locked
from ddp_train.system.redaction import reference, references

_LOCKED_WITHIN_S = 300.0  # of its submission: a run that is being started over SSH has locked its folder by then


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The files and commands of a submission: `plan` prints them, `Engine.submit` writes and runs them."""

    files: Mapping[Path, str]  # path -> text
    commands: Sequence[Sequence[str]]  # as argument lists, in this order
    run_folders: Sequence[Path]  # of the specs
    shares: Sequence[int] = ()  # where a command submits several runs: for how many of them, in their order, each command is

    def write(self) -> None:
        for path, text in self.files.items():
            write_atomic(path, text)


class Stage(StrEnum):
    """How far an engine has come with what was submitted."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a submission. None and "": the engine does not know, or it does not apply."""

    stage: Stage
    why: str = ""  # it waits; or how it ended, in the engine's words
    nodes: tuple[str, ...] = ()  # where it runs, or ran
    since: float | None = None  # it has been running; seconds since the epoch
    ends: float | None = None  # its time is up then
    is_sure: bool = True  # False: this machine cannot tell whether it has ended

    def __str__(self) -> str:
        where = f" on {', '.join(self.nodes)}" if self.nodes else ""
        if self.stage is Stage.QUEUED:
            return f"queued{self.why and f' ({self.why})'}"
        if self.stage is Stage.ENDED:
            return f"ended{where}{self.why and f': {self.why}'}"
        since = f" since {_clock(self.since)}" if self.since is not None else ""
        until = f", until {_clock(self.ends)} at most" if self.ends is not None else ""
        return f"running{where}{since}{until}{self.why and f' ({self.why})'}"


class NoAnswer(EnvironmentRefuses):
    """`Engine.submit` cannot say whether the job was submitted."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Machines that an engine has given to the job in which this command was typed: a run takes them at once."""

    id: str  # of the job
    starter: str  # the engine's command that starts a program on each of the machines
    run: Callable[[Spec], int]  # to its end; returns the exit code


class Engine(ABC):
    """One kind of cluster; no caller asks for an engine's name to know what it can do."""

    has_queue: bool = False  # what it was given waits for other runs, and goes on without the command that gave it

    def allocation(self) -> Allocation | None:
        """Return the machines that are given already; None: a run is submitted. ConfigError: no run can start from here."""
        return None

    def most_runs(self) -> int:
        """Return how many runs one submission has at most."""
        return 1

    @abstractmethod
    def render(self, specs: Sequence[Spec]) -> Rendered:
        """Return the files and the commands for these runs, or refuse what the engine cannot do. Pure: writes nothing, asks no engine."""

    @abstractmethod
    def submit(self, rendered: Rendered) -> str:
        """Write the files, run the commands, and return the engine's id of it; every run's folder has it then, too (`Submission`)."""

    @abstractmethod
    def state(self, id: str) -> State:
        """Return the state of a submission."""

    @abstractmethod
    def stop(self, id: str, *, at_once: bool = False) -> None:
        """Let a submission save and end, or end it at once."""

    @abstractmethod
    def follow(self, run_folder: RunFolder, id: str) -> int:
        """Print the state of a submission until it has ended, and return the exit code of the run."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """RUN/launch/submitted.json: the engine that has the run, and its id for it."""

    engine: str
    id: str
    time: float = field(default_factory=time.time)  # seconds since the epoch

    def write(self, run_folder: RunFolder) -> None:
        write_json(run_folder.submitted, asdict(self))

    @classmethod
    def read(cls, run_folder: RunFolder) -> Submission | None:
        """Return it; None for a run that was given to no engine. An id that is no name could be an option of `scancel`: DataError."""
        try:
            submission = cls(**read_json(run_folder.submitted))
        except FileNotFoundError:
            return None
        if submission.engine not in ENGINES or not re.fullmatch(r"\w[\w.:-]*", submission.id):
            happened = f"{run_folder.submitted} says {submission.engine} {submission.id}"
            raise DataError(happened=happened, expected="the name of an engine, and its id of the run")
        return submission

    def state(self, run_folder: RunFolder) -> State:
        """Return the state of the run at the engine; where that cannot tell from this machine, the folder's lock does."""
        state = engine_of(self.engine).state(self.id)
        if state.is_sure or time.time() - self.time < _LOCKED_WITHIN_S or is_locked(run_folder.root):
            return state
        return replace(state, stage=Stage.ENDED, why="no process has locked its folder")


def submitted_state(run_folder: RunFolder) -> State | str | None:
    """Return the state of a run at its engine; a text: why the engine does not answer; None: no engine has the run."""
    submission = Submission.read(run_folder)
    if submission is None:
        return None
    try:
        return submission.state(run_folder)
    except UserError as error:
        return f"{submission.engine}, job {submission.id}: {error.happened}"


def engine_of(name: str) -> Engine:
    return cast(Engine, importlib.import_module(f"{__package__}.{name}").ENGINE)


def has_queue(launcher: str | None) -> bool:
    return launcher in ENGINES and engine_of(launcher).has_queue


def setup_lines(setup: Sequence[str], *, refuse: str) -> Iterator[str]:
    """Yield `cluster.setup` as lines of bash, and after each a test that ends the script where its last command has failed.

    A secret stands in a line as the variable that has it, which every engine brings to the machines: no script holds its value.
    `refuse` is a function of the script, which is told what happened, and does not come back.
    """
    for line in setup:
        if "\n" in line or "\0" in line:
            raise ConfigError(key="cluster.setup", happened=f"{line!r} contains a line break", expected="one line of bash in each item")
        yield reduce(lambda text, name: text.replace(reference(name), f"${{{name}}}"), references(line), line)
        yield f"[ $? = 0 ] || {refuse} {shlex.quote(f'cluster.setup failed: {line}')}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
