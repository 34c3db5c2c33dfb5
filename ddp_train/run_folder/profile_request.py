"""A request to a running run: record some steps. It is a file in the run's folder, which rank 0 looks for at its log steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import create_json

KINDS = ("trace", "memory")


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What is to be recorded. None: as the run's section `profile` says."""

    kind: str | None = None  # trace | memory
    steps: int | None = None
    ranks: list[int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in (None, *KINDS):
            raise ValueError(f"kind is {self.kind!r}, not {' or '.join(KINDS)}")
        if self.steps is not None and not (type(self.steps) is int and self.steps >= 1):
            raise ValueError(f"steps is {self.steps!r}, not a number of at least 1")
        is_list = isinstance(self.ranks, list) and self.ranks and all(type(rank) is int and rank >= 0 for rank in self.ranks)
        if self.ranks is not None and not is_list:
            raise ValueError(f"ranks is {self.ranks!r}, not a list of numbers from 0")

    def put(self, run_folder: RunFolder) -> bool:
        """Write the request into a run's folder; return False if an earlier request still waits."""
        return create_json(run_folder.profile_request, {name: value for name, value in vars(self).items() if value is not None})

    @classmethod
    def pop(cls, run_folder: RunFolder) -> ProfileRequest:
        """Read the request and remove it. An empty file, as `touch` makes it, stands for the section `profile`.

        Raises OSError: it is gone or cannot be removed. ValueError: it is no request.
        """
        text = run_folder.profile_request.read_text()
        run_folder.profile_request.unlink()
        content: Any = json.loads(text) if text.strip() else {}
        if not isinstance(content, dict) or not content.keys() <= cls.__dataclass_fields__.keys():
            raise ValueError(f"not an object of {', '.join(cls.__dataclass_fields__)}")
        return cls(**content)
