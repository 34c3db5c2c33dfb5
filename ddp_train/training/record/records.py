"""Write a run's numbers and events: to the metric writers, to events.jsonl and to the terminal."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.interfaces import MetricWriter, SupportsImages, SupportsTexts
from ddp_train.model_log import values_of
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import GrowingFile
from ddp_train.system.redaction import redact, redact_all

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""One line of metrics.jsonl."""

RunEvent = dict[str, Any]
"""One line of events.jsonl."""


def run_event(kind: str, step: int, **facts: Any) -> RunEvent:
    return {"time": time.time(), "kind": kind, "step": step, **facts}


class Records:
    """Gets a run's records and events on every rank. Rank 0 alone writes them, with metric writers that open after the present step."""

    def __init__(self, run_folder: RunFolder, world: World, open_writers: Callable[[], list[MetricWriter]]) -> None:
        self._run_folder, self._world, self._open_writers = run_folder, world, open_writers
        self._writers = open_writers()
        self._lines: dict[Path, GrowingFile] = {}  # events.jsonl and times.jsonl, from their first line on: most runs have no event
        self.last_values: dict[str, Any] = {}  # the newest value of every metric, as `split/name`, on every rank
        self.reports: list[RunEvent] = []  # events that callbacks are shown (`Run.reports`), on every rank
        self._warned_of: set[str] = set()  # kinds that no writer takes
        self._listeners: list[Callable[[Record], None]] = []

    def listen(self, listener: Callable[[Record], None]) -> None:
        """Call `listener` with every record from now on, on every rank and before it is written."""
        self._listeners.append(listener)

    def write(self, record: Record) -> None:
        self.last_values |= values_of(record)
        record = redact_all(record)  # users choose the metrics' names and the writers
        for listener in self._listeners:
            listener(record)
        for writer in self._writers:
            writer.write(record)
        if not self._writers:  # else it is in their files, and logging it would only take time
            logger.info("%s", record)

    def show(self, name: str, value: Tensor | str, step: int) -> None:
        """Give an image or a text to the writers that take one (rank 0)."""
        kind, is_shown = "texts" if isinstance(value, str) else "images", False
        for writer in self._writers:
            if isinstance(value, str) and isinstance(writer, SupportsTexts):
                writer.write_text(redact(name), redact(value), step)
                is_shown = True
            elif isinstance(value, Tensor) and isinstance(writer, SupportsImages):
                writer.write_image(redact(name), value, step)
                is_shown = True
        if not is_shown and kind not in self._warned_of:
            self._warned_of.add(kind)
            print(f"{name} and other {kind} are not recorded: no metric writer accepts {kind}; metrics.tensorboard does", flush=True)

    def log_event(self, event: RunEvent, line: str) -> None:
        """Write one line of events.jsonl, and print `line`, if there is one."""
        self._append(self._run_folder.events, event)
        if line:
            self._world.print(line)

    def report(self, event: RunEvent, line: str) -> None:
        """Log an event of slow ranks or slow data, and show it to callbacks."""
        self.reports.append(event)
        self.log_event(event, line)

    def write_times(self, line: Mapping[str, Any]) -> None:
        self._append(self._run_folder.times, line)

    def _append(self, path: Path, content: Mapping[str, Any]) -> None:
        if self._world.is_main:
            if path not in self._lines:
                self._lines[path] = GrowingFile(path, keeps=lambda line: line.endswith("}"))  # a kill leaves half a line
            self._lines[path].append(json.dumps(content))

    def reopen(self) -> None:
        """Go on after a rewind: the writers drop the records after the present step."""
        for writer in self._writers:
            writer.close()
        self._writers = self._open_writers()

    def close(self) -> None:
        """Write all that is left. Raises OSError: the disk is still full."""
        for writer in self._writers:
            writer.close()
        for file in self._lines.values():
            file.close()
