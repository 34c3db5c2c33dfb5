"""What a rank asks its watchdog to watch; a line on the watchdog's standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

OTHER_NODES = 2
"""Where nobody on this node is to blame, another node has this many time-outs to name somebody."""


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """What to watch."""

    run_folder: str
    start_timeout_s: float | None  # without a beat, until a rank has taken its first step; None: as long as it takes
    step_timeout_s: float | None  # the same, after it
    uses_device: bool  # a GPU
    shows: bool  # a report goes to the terminal too
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid, of this node
    world_size: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WatchRequest:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "pids": {int(rank): pid for rank, pid in fields["pids"].items()}})
