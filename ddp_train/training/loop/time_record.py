"""Where the time goes, always on: this rank's seconds in each part of a step, and what all ranks' seconds show.

A rank is in one part at a time, and entering another one ends it: parts do not overlap, and sum to the wall time. On the CPU that is one
look at the clock for each part. On a GPU the host runs ahead, so its clock tells nothing: an event on the stream stands for each look, and
the time between two of them is the device's. An idle device waits in the part that the host is in. Events are read where the device has
passed them, never waited for.

Exposed communication begins when all gradients of this rank are complete, and ends with backward.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from functools import partial
from socket import gethostname
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import DistError

from ddp_train.distributed.store import round_trip_s
from ddp_train.distributed.world import World
from ddp_train.interfaces import ExchangeClock
from ddp_train.run_folder.result import Status
from ddp_train.system import process_env
from ddp_train.system.phase import PART_OF_PHASE, Part, Phase
from ddp_train.training.loop.hooks import RunServices
from ddp_train.training.loop.train_step import Mark, StepMarks
from ddp_train.training.parts.components import Components
from ddp_train.training.record.log_window import Reading
from ddp_train.training.record.logged import Reduction
from ddp_train.training.record.records import run_event
from ddp_train.training.record.slow_ranks import SlowRanks, Table
from ddp_train.training.train_state import TrainState
from ddp_train.traits import name_of

_MANY_EVENTS = 512  # then those that are passed are read
_LINES = 1000  # the file grows by so many lines while the time since its first grows by a factor of 2.7; by fewer with many ranks
_RANKS_OF_LINES = 64


class TimeSplit:
    """Sums this rank's seconds in each part by the host's clock; those that are `not_split` are other ones."""

    def __init__(self, not_split: Collection[Part] = ()) -> None:
        contexts = {part: _Within(self, Part.OTHER if part in not_split else part) for part in Part}
        self.mark: Mark = contexts.__getitem__  # no call in Python; within another one a part's time is not counted to that
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self._seconds = dict.fromkeys(Part, 0.0)
        self._part = Part.OTHER
        self._since = time.perf_counter()

    def switch(self, part: Part) -> Part:
        """Enter a part, and return the one before."""
        before = self._part
        if part is not before:
            now = time.perf_counter()
            self._seconds[before] += now - self._since
            self._part, self._since = part, now
        return before

    def enter_phase(self, phase: Phase, step: int) -> None:
        """Enter the part that a phase of the rank is (a listener of `Phases`)."""
        self.switch(PART_OF_PHASE[phase])

    def seconds(self) -> dict[Part, float]:
        """Return the seconds of each part, in their order, as far as they are known."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._since = now
        return {**self._seconds}


class DeviceTimeSplit(TimeSplit):
    """Sums this rank's seconds in each part by the device's clock. `new_event` makes an event with `record`, `query` and `elapsed_time`."""

    def __init__(
        self, not_split: Collection[Part] = (), new_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)
    ) -> None:
        self._new_event = new_event
        self._spare: list[Any] = []
        super().__init__(not_split)

    def begin(self) -> None:
        self._seconds = dict.fromkeys(Part, 0.0)
        self._part = Part.OTHER
        self._events = deque([(Part.OTHER, self._event())])  # the part that begins, and when

    def switch(self, part: Part) -> Part:
        before, self._part = self._part, part
        if part is not before:
            self._events.append((part, self._event()))
            if len(self._events) > _MANY_EVENTS:
                self._read()
        return before

    def seconds(self) -> dict[Part, float]:
        self._events.append((self._part, self._event()))
        self._read()
        return {**self._seconds}

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()  # on the current stream; in backward autograd has made it that of forward
        return event

    def _read(self) -> None:
        """Count the time between the events that the device has passed."""
        events = self._events
        while len(events) > 1 and events[1][1].query():
            part, start = events.popleft()
            self._seconds[part] += float(start.elapsed_time(events[0][1])) / 1e3
            self._spare.append(start)


class _Within(AbstractContextManager[None]):
    """A part as a context, which may be entered again within itself. Made once: a generator takes three times as long."""

    def __init__(self, split: TimeSplit, part: Part) -> None:
        self._split, self._part = split, part
        self._before: list[Part] = []

    def __enter__(self) -> None:
        self._before.append(self._split.switch(self._part))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._split.switch(self._before.pop())


class TimeRecord:
    """Splits a run's time on this rank, and gives all ranks the split of all; rank 0 writes times.jsonl."""

    def __init__(self, components: Components, state: TrainState, world: World, services: RunServices, step_marks: StepMarks) -> None:
        self._components, self._state, self._world = components, state, world
        self._services, self._step_marks = services, step_marks
        hidden = _hidden_exchange(components) if world.size > 1 else ""
        reason = f"{hidden} exchanges within forward and backward, while they compute"
        self._not_split = {Part.COMMUNICATION: reason} if hidden else {}
        self.split = (DeviceTimeSplit if world.device.type == "cuda" else TimeSplit)(self._not_split)
        self._round_trip = 0.0  # seconds of a message to the ranks' store and back; 0: not known
        self._began = self._taken = self._written = 0.0  # by the monotonic clock: the first line, the last reading, the last line
        self._written_step, self._written_totals = 0, np.zeros(())

    def begin(self) -> None:
        """Called before the first step, and after a rewind. Collective."""
        state = self._state
        if self._began:
            is_rewind = bool(state.jumps) and state.jumps[-1].to_step == state.step  # else a stopped trainer goes on
            self._write_rest(state.jumps[-1].from_step if is_rewind else state.step)
            self._written_step = state.step
            return
        self._hosts = self._world.gather(gethostname())  # of each rank
        self._first_ranks = {self._hosts.index(host) for host in self._hosts}  # of each machine
        self._slow_ranks = SlowRanks(self._hosts, state.steps_run, is_split=not self._not_split)
        self._listen()
        self.split.begin()
        self._began = self._written = time.monotonic()
        self._written_step = state.step
        line = {"started": round(self._services.started_at, 3), "restart": process_env.restart_count() > 0}
        line |= {"queued": self._services.run_folder.submitted.exists(), "step": state.step}
        self._services.records.write_times({**line, "hosts": self._hosts, "parts": [*Part], "not_split": self._not_split})

    def add_to(self, reduction: Reduction) -> None:
        """Add this rank's row to the reduction: the others have zeros in its place."""
        self._taken = time.monotonic()
        rows = np.zeros((self._world.size, len(Part) + 1))
        rows[self._world.rank] = [*self.split.seconds().values(), self._round_trip]
        self._rows = reduction.add(rows.ravel().tolist())

    def record(self, values: dict[str, float], reading: Reading) -> None:
        """Write a line where one is due, and report what the rows of all ranks show."""
        totals, round_trips = self._summed_rows()
        if self._taken - self._written >= (self._taken - self._began) / _LINES * max(1.0, len(totals) / _RANKS_OF_LINES):
            self._write(totals, self._state.step)
        known = {rank: round_trips[rank] for rank in self._first_ranks}
        for finding in self._slow_ranks.look(totals, self._state.steps_run, known if all(known.values()) else {}):
            event = run_event(**finding, step=self._state.step)
            self._services.records.report(event, f"{'data' if event['kind'] == 'waits_for_data' else 'slow':<8} {event['text']}")
        if self._slow_ranks.measures_round_trips:
            self._round_trip = 0.0
            if self._world.rank in self._first_ranks:
                Thread(target=self._measure_round_trip, name="round_trip", daemon=True).start()

    def end(self, status: Status) -> None:
        """Write the rest: the time of evaluations and saves after the last record. Collective."""
        self._write_rest(self._state.step)
        self._services.phases.forget(self.split.enter_phase)
        self._components.strategy.set_clock(ExchangeClock())

    def _listen(self) -> None:
        """Listen to what a step is at: its marks, the strategy's exchanges, the rank's phases."""
        begin = (lambda: None) if self._not_split else partial(self.split.switch, Part.COMMUNICATION)
        self._components.strategy.set_clock(ExchangeClock(around=partial(self.split.mark, Part.COMMUNICATION), begin_in_backward=begin))
        self._step_marks.listen(self.split.mark)
        self._services.phases.listen(self.split.enter_phase, is_first=True)  # before faults, whose time is that of the phase

    def _measure_round_trip(self) -> None:
        with suppress(DistError, OSError):
            assert self._world.store is not None
            self._round_trip = round_trip_s(self._world.store)

    def _summed_rows(self) -> tuple[Table, list[float]]:
        """Return the seconds of all ranks in each part since the first step, and those of their round trips, after a reduction."""
        table = np.array(self._rows.sums).reshape(self._world.size, -1)
        return table[:, :-1], table[:, -1].tolist()

    def _write_rest(self, step: int) -> None:
        """Write the time that no line has yet. Collective."""
        reduction = Reduction(self._world)
        self.add_to(reduction)
        reduction.sum()
        self._write(self._summed_rows()[0], step)

    def _write(self, totals: Table, step: int) -> None:
        """Write the time since the line before: where records are many, a line takes several."""
        rows = [
            [None if part in self._not_split else float(f"{seconds:.4g}") for part, seconds in zip(Part, row, strict=True)]
            for row in totals - self._written_totals
        ]
        taken = time.time() - (time.monotonic() - self._taken)
        line = {"step": step, "time": round(taken, 3), "seconds": round(self._taken - self._written, 6), "steps": step - self._written_step}
        self._services.records.write_times({**line, "ranks": rows})
        self._written, self._written_step, self._written_totals = self._taken, step, totals


def _hidden_exchange(components: Components) -> str:
    """Return what exchanges while forward and backward compute, so that no time of its own is known; "": nothing does."""
    if any(isinstance(part, nn.SyncBatchNorm) for turn in components.turns.all for part in turn.wrapped.modules()):
        return "batch norm of all ranks' samples"
    strategy = components.strategy
    if strategy.exchange_is_timed:
        return ""
    return name_of(strategy)
