"""A writer that sends metrics to an experiment tracker: a thread sends them, the loop never waits, and no step is sent twice.

A tracker forgets nothing that it was sent. So a run that continues from an earlier step (after a kill, or a rewind) sends nothing for steps
that the tracker has; records that a kill or a dead server has withheld come from metrics.jsonl, which is exact. Images and texts are stored
nowhere else: each is sent once, and one that fails is left out.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_train.metrics.jsonl import FILE
from ddp_train.model_log import values_of
from ddp_train.system.files import json_lines, write_json

if TYPE_CHECKING:  # the configuration's check imports trackers, and no torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_BATCH_S = 1.0  # at most one message a second, however often the loop logs
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # between two tries to reach a server
_MAX_ERROR_LENGTH = 300  # characters of an error
_MAX_MEDIA_BYTES = 2**26  # of images and texts that wait in memory


@dataclass(frozen=True)
class Media:
    name: str
    content: NDArray[np.uint8] | str  # pixels [H, W, 3], grey ones [H, W]; or Markdown

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, str) else self.content.nbytes


@dataclass(kw_only=True)
class Row:
    """All records, images and texts of one step."""

    step: int
    time: float = field(default_factory=time.time)  # seconds since 1970
    values: dict[str, float] = field(default_factory=dict)  # as `split/name`; epoch and samples without a split
    media: list[Media] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        self.time = record["time"]
        values = {"epoch": record.get("epoch"), "samples": record.get("samples"), **values_of(record)}
        self.values |= {name: value for name, value in values.items() if isinstance(value, (int, float))}


def require(package: str) -> None:
    """Raise ModuleNotFoundError if a client is not installed. The thread imports it, which takes seconds, while training goes on."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f'the package {package} is not installed here: pip install "ddp-train[{package}]"', name=package)


@dataclass(kw_only=True, eq=False)
class Tracker(ABC):
    """Sends rows to a service, in a thread: each row when the next step's first record completes it.

    Rows wait in memory while the service is slow or dead, and are sent again; the end of the run waits `close_timeout_s`.

    Args:
        run_dir, config: the run folder, and the run's whole config.
        run_name: of a sweep's job, its values that differ from other jobs'.
        step: the step that this attempt begins at.
        close_timeout_s: how long the end of the run waits until all is sent.
    """

    service: ClassVar[str]  # its name, for messages
    file: ClassVar[str]  # the run's id is kept in `trackers/FILE.json`

    run_dir: str
    config: dict[str, Any]
    run_name: str = ""
    step: int = 0
    close_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self.folder, self.closing = Path(self.run_dir).absolute(), Event()
        self.group = self.folder.parent.name if self.run_name else None  # of a sweep's jobs: the sweep
        self.run_name = self.run_name or self.folder.name
        self.run: Any = None  # the client's own, once it is connected
        self._state_file = self.folder / "trackers" / f"{self.file}.json"
        known = json.loads(self._state_file.read_text()) if self._state_file.exists() else {}
        self._id: str | None = known.get("id")
        self._sent: int = known.get("step", -1)  # the newest step that the service has
        self._rows: deque[Row] = deque()  # that wait; the newest one may still grow
        self._media_in = self._media_done = 0  # bytes of images and texts: all so far (counted by the loop), and sent ones (by the thread)
        self._has_work = Event()
        self._said = set[str]()  # kinds of messages that were printed, and are not repeated
        self._is_given_up = self._is_finished = False
        self._thread = Thread(target=self._work, name=f"tracker-{self.file}", daemon=True)
        self._thread.start()

    @abstractmethod
    def connect(self, run_id: str | None) -> int | None:
        """Open a new run or the one with this id, `remember` its id, and return the newest step that it has; None: unknown."""

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows, in the order of their steps; here to a run with a method `log`, as W&B's and similar clients have."""
        for row in rows:
            self.run.log(dict(row.values), step=row.step)

    @abstractmethod
    def show(self, media: Media, step: int) -> None:
        """Send an image or a text, after the step's numbers."""

    def finish(self) -> None:
        """End the service's run, and wait until the service has all of it; here a run with a method `finish`."""
        self.run.finish()

    def remember(self, run_id: str) -> None:
        """Keep the run's id for later attempts, before or after the service knows it."""
        self._id = run_id
        self._save()

    def write(self, record: Mapping[str, Any]) -> None:
        self._row(record["step"]).add(record)

    def write_image(self, name: str, image: Tensor, step: int) -> None:
        from ddp_train.metrics.tensorboard import as_pixels

        pixels_HWC = as_pixels(image)
        self._add_media(Media(name, pixels_HWC if pixels_HWC.shape[2] > 1 else pixels_HWC[:, :, 0]), step)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._add_media(Media(name, text), step)

    def close(self) -> None:
        """Let the thread send the remaining rows, and wait for it up to `close_timeout_s`."""
        self.closing.set()
        self._has_work.set()
        self._thread.join(self.close_timeout_s)
        if not self._is_finished:
            self._is_given_up = True  # the next writer begins with the unsent rows
            print(f"{self.service} did not accept everything within {self.close_timeout_s:g} s; metrics.jsonl has it", flush=True)

    def _row(self, step: int) -> Row:
        """Return the row of a step; the row before it is complete now."""
        if not self._rows or self._rows[-1].step != step:
            self._rows.append(Row(step=step))
            self._has_work.set()
        return self._rows[-1]

    def _add_media(self, media: Media, step: int) -> None:
        if self._media_in - self._media_done + media.size > _MAX_MEDIA_BYTES:
            self._print_once("full", f"has {_MAX_MEDIA_BYTES >> 20} MiB of images and texts waiting; more are dropped until they are sent")
            return
        self._said.discard("full")
        self._media_in += media.size
        self._row(step).media.append(media)

    def _print_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            print(f"{self.service} {text}", flush=True)
        self._said.add(kind)

    def _work(self) -> None:
        """Send until the end, and try again after every error (the thread)."""
        pause_s, is_open = _FIRST_PAUSE_S, False
        while True:
            self._has_work.clear()
            is_last = self.closing.is_set()  # read before the rows: all rows from before are there
            try:
                if not is_open:
                    self._open()
                    is_open = True
                self._send_rows(list(self._rows) if is_last else list(self._rows)[:-1])
                if is_last:
                    self.finish()
                    self._is_finished = True
                    return
            except Exception as error:  # a third-party client and server may raise anything
                if is_last or self._is_given_up:
                    return
                self._print_once("behind", f"is behind ({_text(error)}); training continues, and rows are sent again later")
                self.closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if "behind" in self._said:
                print(f"{self.service} is up to date again", flush=True)
            self._said.discard("behind")
            pause_s = _FIRST_PAUSE_S
            self._has_work.wait()
            self.closing.wait(_BATCH_S)

    def _open(self) -> None:
        newest_step = self.connect(self._id)
        if newest_step is not None:
            self._sent = newest_step
        missed: dict[int, Row] = {}  # by step
        if self._sent < self.step:
            for record in json_lines(self.folder / FILE):
                if self._sent < record["step"] <= self.step:
                    missed.setdefault(record["step"], Row(step=record["step"])).add(record)
        self._rows.extendleft(reversed(missed.values()))

    def _send_rows(self, rows: list[Row]) -> None:
        """Send complete rows, in batches that end at a row with media: some services refuse a step after a later one."""
        new = [row for row in rows if row.step > self._sent]
        while new and not self._is_given_up:
            count = next((number for number, row in enumerate(new, 1) if row.media), len(new))
            batch, new = new[:count], new[count:]
            if numbers := [row for row in batch if row.values]:
                self.send(numbers)
            for media in batch[-1].media:
                try:
                    self.show(media, batch[-1].step)
                except Exception as error:  # it is not tried again: numbers must not wait for it
                    self._print_once("refused", f"refused `{media.name}` ({_text(error)}); such images and texts are dropped")
            self._sent = batch[-1].step
            self._save()
        for _ in rows:  # only now: rows that were not sent are sent again
            self._media_done += sum(media.size for media in self._rows.popleft().media)

    def _save(self) -> None:
        write_json(self._state_file, {"id": self._id, "step": self._sent})


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_ERROR_LENGTH]}"
