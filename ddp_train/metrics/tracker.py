"""A writer whose numbers go to an experiment tracker: a thread sends them, the loop never waits, and no step is sent twice.

What a tracker has been told cannot be taken back. So a run that goes on from an earlier step (after a kill, or a rewind) says nothing of
the steps that the tracker has; and what a kill or a dead server has kept from it comes from metrics.jsonl, which is exact.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ddp_train.system.files import write_json

_AXES = ("split", "step", "time")
_BATCH_S = 1.0  # at most one message a second, however often the loop logs
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # between two tries to reach a server
_LONGEST_TEXT = 300  # characters of an error


@dataclass(frozen=True, kw_only=True)
class Row:
    """All that was recorded of one step."""

    step: int
    time: float  # seconds since 1970, of its first record
    values: Mapping[str, float] = field(default_factory=dict)  # as `split/name`; epoch and samples without a split


class Tracker(ABC):
    """Sends rows to a service, from a thread of its own.

    A row goes on its way when a later step's first record comes, whole. The service may be slow or dead for as long as it likes: rows wait
    in memory, it is tried again, and the end of the run waits `close_timeout_s` for it.

    Args:
        name: of the service, for messages.
        file: the run's id there is kept in `trackers/FILE.json`.
        run_dir: the run folder.
        step: the step that this attempt begins at.
        close_timeout_s: how long the end of the run waits for what is not sent.
    """

    def __init__(self, name: str, file: str, *, run_dir: str, step: int, close_timeout_s: float) -> None:
        self._name, self._first_step, self._close_timeout_s = name, step, close_timeout_s
        self._history = Path(run_dir) / "metrics.jsonl"
        self._file = Path(run_dir) / "trackers" / f"{file}.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._id: str | None = known.get("id")
        self._sent: int = known.get("step", 0)  # the newest step that the service has
        self._row: list[Mapping[str, Any]] = []  # records of the newest step
        self._waiting: deque[Row] = deque()
        self._has_work, self._closing = Event(), Event()
        self._is_behind = self._is_given_up = self._is_finished = False
        self._thread = Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def connect(self, run_id: str | None) -> int | None:
        """Open the run, a new one or the one with this id, and `remember` its id.

        Returns:
            The newest step that the service has; None where it cannot tell.
        """

    @abstractmethod
    def send(self, rows: Sequence[Row]) -> None:
        """Hand over rows, in the order of their steps."""

    @abstractmethod
    def finish(self) -> None:
        """Tell the service that this was all, and wait until it has it."""

    @property
    def is_closing(self) -> bool:
        """Whether the run waits for the last rows."""
        return self._closing.is_set()

    def lost(self) -> str:
        """Return how what the service did not take can be sent later."""
        return "metrics.jsonl has it"

    def remember(self, run_id: str) -> None:
        """Keep the run's id for later attempts, before or after the service knows it."""
        self._id = run_id
        self._note()

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record; returns at once."""
        if self._row and self._row[0]["step"] != record["step"]:
            self._hand_over()
        self._row.append(record)

    def close(self) -> None:
        """Let the thread send what is left, and wait for it a while."""
        self._hand_over()
        self._closing.set()
        self._has_work.set()
        self._thread.join(self._close_timeout_s)
        if not self._is_finished:
            self._is_given_up = True  # a writer that follows this one begins with what it has not sent
            self._say(f"did not take everything within {self._close_timeout_s:g} s; {self.lost()}")

    def _hand_over(self) -> None:
        if self._row:
            self._waiting.append(_row(self._row))
            self._row = []
            self._has_work.set()

    def _work(self) -> None:
        """Send until the end, and begin again after whatever goes wrong (the thread)."""
        pause_s, is_open = _FIRST_PAUSE_S, False
        while True:
            self._has_work.clear()
            is_last = self._closing.is_set()  # asked before looking: what came before it is waiting
            try:
                if not is_open:
                    self._open()
                    is_open = True
                self._send_waiting()
                if is_last:
                    self.finish()
                    self._is_finished = True
                    return
            except Exception as error:  # of somebody else's client and server: anything
                if is_last or self._is_given_up:
                    return
                if not self._is_behind:
                    text = " ".join(str(error).split())[:_LONGEST_TEXT]
                    self._say(f"is behind ({type(error).__name__}: {text}); training goes on, and it is tried again")
                self._is_behind = True
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if self._is_behind:
                self._say("has everything again")
            self._is_behind, pause_s = False, _FIRST_PAUSE_S
            self._has_work.wait()
            self._closing.wait(_BATCH_S)

    def _open(self) -> None:
        found = self.connect(self._id)
        if found is not None:
            self._sent = found
        if self._sent < self._first_step:
            self._waiting.extendleft(reversed([*_rows(self._history, after=self._sent, until=self._first_step)]))

    def _send_waiting(self) -> None:
        while self._waiting and not self._is_given_up:
            rows = list(self._waiting)
            new = [row for row in rows if row.step > self._sent]
            if new:
                self.send(new)
                self._sent = new[-1].step
                self._note()
            for _ in rows:  # only now: what was not sent is sent again
                self._waiting.popleft()

    def _note(self) -> None:
        write_json(self._file, {"id": self._id, "step": self._sent})

    def _say(self, text: str) -> None:
        print(f"{self._name} {text}", flush=True)


def _row(records: Iterable[Mapping[str, Any]]) -> Row:
    records = list(records)
    values: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name not in _AXES and isinstance(value, (int, float)):
                values[name if name in ("epoch", "samples") else f"{record['split']}/{name}"] = value
    return Row(step=records[0]["step"], time=records[0]["time"], values=values)


def _rows(history: Path, *, after: int, until: int) -> Iterator[Row]:
    """Yield what metrics.jsonl has of steps after one, until another."""
    records = []
    for line in history.read_text().splitlines() if history.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a kill has left it half written
            continue
        if after < record["step"] <= until:
            records.append(record)
    for _, each in groupby(records, key=lambda record: record["step"]):
        yield _row(each)
