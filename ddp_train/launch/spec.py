"""What is given to an engine: one run, frozen, as RUN/launch/spec.json. Never a command, and nothing that is unpickled.

The process that was typed composes, claims, copies the source and writes the spec. Every machine reads the same file, and can
say by its hash that it did.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.job import Job
from ddp_train.launch.source_copy import Code
from ddp_train.system.files import earlier_copy, write_atomic


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run for an engine: what runs, in which shape, and how the engine is to be used."""

    job: Job
    engine: str  # who starts the node programs: one of `ENGINES`, or "machines": a person
    processes: tuple[int, ...]  # for each machine, the first one first
    min_nodes: int  # fewer than `processes` has where machines may come and go
    code: Code | None = None  # None: what is installed and lies where the command stands, on each machine
    working_directory: str = field(default_factory=os.getcwd)
    token: str = field(default_factory=lambda: secrets.token_hex(16))  # who knows it may speak to the run's registry
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # the engine's own

    @property
    def max_nodes(self) -> int:
        return len(self.processes)

    @property
    def is_elastic(self) -> bool:
        """Whether machines may come and go."""
        return self.min_nodes < self.max_nodes

    def to_json(self) -> str:
        """Return the spec as text, the same text for equal specs."""
        content = {**vars(self), "job": json.loads(self.job.to_json()), "code": self.code and asdict(self.code)}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Spec:
        content = json.loads(text)
        code = content["code"] and Code(**{**content["code"], "roots": tuple(content["code"]["roots"])})
        return cls(**{**content, "job": Job.from_json(json.dumps(content["job"])), "code": code, "processes": tuple(content["processes"])})

    def hash(self) -> str:
        """Return the sha256 of the spec, by which machines tell that they have the same."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def write(self) -> Path:
        """Write RUN/launch/spec.json, which the user and their group alone can read, and return its path.

        One that is there, of an earlier launch, stays as spec.1.json, spec.2.json, ...
        """
        path = self.job.run_folder.spec
        if path.exists():
            path.rename(earlier_copy(path))
        write_atomic(path, json.dumps({"hash": self.hash(), **json.loads(self.to_json())}, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Read a spec back. EnvironmentRefuses: this machine does not see it, it is damaged, or it was edited."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            submitted, spec = content.pop("hash"), cls.from_json(json.dumps(content))
            if spec.hash() == submitted:
                return spec
            happened = f"{path} was edited since it was submitted"
        except OSError as error:
            happened = f"{path} cannot be read on {os.uname().nodename}: {error.strerror}"
        except (ValueError, TypeError, KeyError) as error:
            happened = f"{path} is not a readable spec: {error!r}"
        expected = "an unchanged RUN/launch/spec.json in a folder that every machine sees"
        raise EnvironmentRefuses(happened=happened, expected=expected, fix="`ddp-train resume RUN key=value` changes a value")
