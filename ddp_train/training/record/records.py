"""Where a run's numbers and events go: to the metric writers, to events.jsonl and to the terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.interfaces import MetricWriter
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import GrowingFile
from ddp_train.system.redaction import redact, redact_all

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""One line of metrics.jsonl."""

Event = dict[str, Any]
"""One line of events.jsonl."""


class Records:
    """Takes a run's records and events on every rank; rank 0 alone has metric writers, opened after the present step, and writes them."""

    def __init__(self, run_folder: RunFolder, world: World, open_writers: Callable[[], list[MetricWriter]]) -> None:
        self._run_folder, self._world, self._open_writers = run_folder, world, open_writers
        self._writers = open_writers()
        self._events: GrowingFile | None = None  # from the first event on: most runs have none
        self._missing: set[str] = set()  # kinds that no writer takes, and that was said
        self._listeners: list[Callable[[Record], None]] = []

    def listen(self, listener: Callable[[Record], None]) -> None:
        """Tell `listener` every record from now on, on every rank and before it is written."""
        self._listeners.append(listener)

    def write(self, record: Record) -> None:
        """Take one line of metrics.jsonl."""
        record = redact_all(record)  # a metric's name is somebody's text, and writers are anybody's
        for listener in self._listeners:
            listener(record)
        for writer in self._writers:
            writer.write(record)
        if not self._writers:  # else it is in their files, and here it would only take time
            logger.info("%s", record)

    def show(self, name: str, shown: Tensor | str, step: int) -> None:
        """Give an image or a text to the writers that take one (rank 0)."""
        kind, method = ("texts", "write_text") if isinstance(shown, str) else ("images", "write_image")
        takers = [writer for writer in self._writers if hasattr(writer, method)]
        for writer in takers:
            getattr(writer, method)(redact(name), redact(shown) if isinstance(shown, str) else shown, step)
        if not takers and kind not in self._missing:
            self._missing.add(kind)
            print(f"{name} and other {kind} go nowhere: no metric writer takes {kind}; metrics.tensorboard does", flush=True)

    def log_event(self, event: Event, line: str) -> None:
        """Take one line of events.jsonl, and the line for people; "": there is none."""
        if not self._world.is_main:
            return
        if self._events is None:
            self._events = GrowingFile(self._run_folder.events, keeps=lambda line: line.endswith("}"))  # a kill leaves half a line
        self._events.append(json.dumps(event))
        if line:
            print(line, flush=True)

    def reopen(self) -> None:
        """Go on after the present step, which is an earlier one: what was written after it is dropped."""
        for writer in self._writers:
            writer.close()
        self._writers = self._open_writers()

    def close(self) -> None:
        """Write what is left, or raise an OSError: there is no space for it still."""
        for writer in self._writers:
            writer.close()
        if self._events is not None:
            self._events.close()
