"""Every path of a run, and the exclusive claim to its folder.

    config.yaml  .hydra/  environment.json  metrics.jsonl  events.jsonl  tensorboard/  logs/  checkpoints/  predictions/
    failure.json  result.json

Imports no torch: the composing process claims the folder and writes the config before any rank exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.errors import ConfigError
from ddp_train.redaction import redact, redact_all
from ddp_train.system import folder_lock


@dataclass(frozen=True)
class RunDir:
    """The paths below one run folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def code_diff(self) -> Path:
        return self.root / "code.diff"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened to the numbers: losses that were not finite, spikes, steps that were skipped or taken back; a line each."""
        return self.root / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def saved_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        return [int(path.parent.name.removeprefix("step_")) for path in self.checkpoints.glob("step_*/COMPLETE")]

    def continues(self) -> str:
        """Say where the run goes on; the newest checkpoint may yet turn out to be damaged."""
        steps = self.saved_steps()
        return f"from step {max(steps)}" if steps else "from the start"

    @property
    def attempts(self) -> Path:
        """The failures since the run last got further (`progress`)."""
        return self.root / "attempts.json"

    @property
    def steps_taken(self) -> Path:
        """How many steps the attempt at hand has taken, at least and at most (`progress`)."""
        return self.logs / "steps_taken"

    @property
    def predictions(self) -> Path:
        return self.root / "predictions"

    def predictions_of(self, step: int) -> Path:
        """Where the per-sample outputs of the evaluation after a step are (`evaluate.save_predictions=true`)."""
        return self.predictions / f"step_{step:08d}"

    @property
    def failure(self) -> Path:
        return self.root / "failure.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    def record_config(self, text: str) -> None:
        """Write config.yaml; one that it replaces (of an attempt under other settings) stays as config.1.yaml, config.2.yaml, ..."""
        if self.config.exists() and self.config.read_text() != text:
            earlier = sum(1 for _ in self.root.glob("config.*.yaml")) + 1
            os.link(self.config, self.root / f"config.{earlier}.yaml")  # there is a config.yaml at any time
        if not self.config.exists() or self.config.read_text() != text:
            write_atomic(self.config, text)

    def forget_failure(self) -> None:
        """Move what an earlier attempt left that did not complete out of the way: this one says how it ends. Reports are numbered."""
        if self.failure.exists():
            earlier = sum(1 for _ in self.root.glob("failure.*.json")) + 1
            self.failure.rename(self.root / f"failure.{earlier}.json")
        if not self.is_completed():
            self.result.unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any]:
        """Return result.json; {} when there is none yet."""
        try:
            result: dict[str, Any] = json.loads(self.result.read_text())
        except FileNotFoundError:
            return {}
        return result

    def is_completed(self) -> bool:
        """Tell whether result.json says so."""
        return self.read_result().get("status") == "completed"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank:05d}.log"

    def stacks(self, rank: int) -> Path:
        """Where the stacks of all threads of a rank are, after a hang."""
        return self.logs / f"stacks_rank_{rank:05d}.txt"

    def agent_log(self, node_rank: int) -> Path:
        """Where torch's agent complains; not there when it has nothing to say."""
        return self.logs / f"agent_{node_rank:05d}.log"

    def shown(self) -> str:
        """Return the path as a person would type it: relative to where they stand, when it lies below."""
        return str(self.root.relative_to(Path.cwd())) if self.root.is_relative_to(Path.cwd()) else str(self.root)


def claim_new(wanted: Path) -> Path:
    """Create `wanted`, or `wanted_1`, `wanted_2`, ... and return the one that is ours alone.

    `mkdir` without `exist_ok` is atomic, so two runs started in the same second get two folders.
    """
    for attempt in range(10_000):
        folder = wanted if attempt == 0 else wanted.with_name(f"{wanted.name}_{attempt}")
        try:
            _make(folder)
        except FileExistsError:
            continue
        folder_lock.hold(folder, key="hydra.run.dir")
        return folder
    raise ConfigError(key="hydra.run.dir", happened=f"{wanted} and 9,999 folders after it exist", fix="choose another name")


def claim_given(folder: Path, *, key: str) -> Path:
    """Create the folder that the user named, or take it over when it is empty.

    Raises:
        ConfigError: it holds something, or another run has it. Nothing is ever written over.
    """
    with contextlib.suppress(FileExistsError):
        _make(folder)
    if folder.is_dir():
        folder_lock.hold(folder, key=key)
    if not folder.is_dir() or any(path.name != folder_lock.HOLDER for path in folder.iterdir()):
        raise ConfigError(
            key=key,
            happened=f"{folder} exists and is not an empty folder",
            expected="a new or an empty folder; nothing is written over",
            fix=f"another {key}, or `ddp-train resume {folder}` when it is a run to continue",
        )
    return folder


def let_go() -> None:
    """Give up every folder that this process holds, and remove those that it made and nothing has come to use."""
    folder_lock.release()
    while _made:
        folder = _made.pop()
        with contextlib.suppress(OSError):
            if {path.name for path in folder.iterdir()} <= _NO_USE:
                shutil.rmtree(folder)


_made: list[Path] = []
_NO_USE = {"multirun.yaml", "conf"}  # what a sweep has before its first job


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        _made.append(folder)
    except FileExistsError:
        if not folder.parent.is_dir():
            raise ConfigError(key="hydra.run.dir", happened=f"{folder.parent} is not a folder") from None
        raise
    except OSError as error:
        raise ConfigError(
            key="hydra.run.dir", happened=f"{folder} cannot be created: {error.strerror}", fix="hydra.run.dir=FOLDER"
        ) from None


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is either all there or not there. Secrets do not get in, and a link in its place is replaced, not followed."""
    with _written_beside(path, text) as temporary:
        os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object, atomically."""
    write_atomic(path, _json(content))


def create_json(path: Path, content: Mapping[str, Any]) -> bool:
    """Write one JSON object unless the file is there; tell whether it was written. Of many ranks and threads exactly one succeeds."""
    with _written_beside(path, _json(content)) as temporary:
        try:
            os.link(temporary, path)  # unlike rename, link refuses to replace
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def _written_beside(path: Path, text: str) -> Iterator[Path]:
    """Give a file with the text, in the folder of `path`, which nobody else has; it is gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(redact(text))
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(redact_all(content), indent=2, default=str) + "\n"


def sha256(text: str) -> str:
    """Return the hash that names a config."""
    return hashlib.sha256(text.encode()).hexdigest()
