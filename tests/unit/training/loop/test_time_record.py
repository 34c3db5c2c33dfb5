"""What a run records of its time: the parts of a rank do not overlap and sum to the wall time, by the clock of its device, too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.interfaces import ExchangeClock, Strategy
from ddp_train.interfaces.strategy import AdaptedStrategy
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.local_sgd import LocalSGD
from ddp_train.system.phase import Part, Phase
from ddp_train.training.loop import time_record
from ddp_train.training.loop.hooks import Hooks
from ddp_train.training.loop.time_record import DeviceTimeSplit, TimeRecord, TimeSplit
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.parts.turns import Turn, Turns
from ddp_train.training.record.loss_monitor import Rewind
from ddp_train.training.record.records import Record
from ddp_train.training.train_state import Jump
from tests.unit.parts import alone, components, trainer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_record.time, "perf_counter", clock)
    return clock


def test_a_part_within_another_one_is_not_counted_to_it_and_all_sum_to_the_wall_time(clock: Clock) -> None:
    split = TimeSplit()
    clock.now = 100.0
    split.begin()
    for phase, seconds in ((Phase.DATA, 1.0), (Phase.STEP, 2.0)):
        split.enter_phase(phase, 0)
        clock.now += seconds
    with split.mark(Part.FORWARD):
        clock.now += 4.0
        with split.mark(Part.COMMUNICATION), split.mark(Part.COMMUNICATION):
            clock.now += 8.0
        clock.now += 16.0
    with split.mark(Part.OPTIMIZER):
        clock.now += 32.0
    split.enter_phase(Phase.EVALUATION, 1)
    clock.now += 64.0
    split.enter_phase(Phase.SAVE, 1)
    clock.now += 128.0
    seconds = split.seconds()
    expected = {
        Part.DATA: 1.0,
        Part.OTHER: 2.0,
        Part.FORWARD: 20.0,
        Part.COMMUNICATION: 8.0,
        Part.OPTIMIZER: 32.0,
        Part.EVALUATION: 64.0,
        Part.CHECKPOINT: 128.0,
        Part.BACKWARD: 0.0,
    }
    assert seconds == expected
    assert [*seconds] == [*Part] and sum(seconds.values()) == clock.now - 100.0
    assert split.seconds() == seconds


class Device:
    """A stream: what is recorded happens once the work before it is done."""

    def __init__(self) -> None:
        self.now = 0.0  # of the device, when all that it was given is done
        self.finished = -1.0  # it has passed all events up to this time
        self.records = 0

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.time = device, 0.0

    def record(self) -> None:
        self._device.records += 1
        self.time = self._device.now

    def query(self) -> bool:
        return self.time <= self._device.finished

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query()  # else it would raise
        return 1e3 * (end.time - self.time)


def test_on_a_device_only_what_it_has_passed_is_read_and_the_rest_with_a_later_record() -> None:
    device = Device()
    split = DeviceTimeSplit(new_event=device.event)
    device.now = 10.0
    split.begin()
    with split.mark(Part.FORWARD):
        device.now += 1.0
    with split.mark(Part.BACKWARD):
        device.now += 2.0
    device.finished = 11.0  # it is still in backward
    assert (split.seconds()[Part.FORWARD], sum(split.seconds().values())) == (1.0, 1.0)
    device.finished = device.now
    assert (split.seconds()[Part.BACKWARD], sum(split.seconds().values())) == (2.0, 3.0)


def test_events_are_used_again() -> None:
    device, made = Device(), deque[Event]()

    def new_event() -> Event:
        made.append(device.event())
        return made[-1]

    split = DeviceTimeSplit(new_event=new_event)
    split.begin()
    for _ in range(5000):
        with split.mark(Part.FORWARD):
            device.now += 1.0
        device.finished = device.now
    assert split.seconds()[Part.FORWARD] == 5000.0
    assert len(made) < 2000


def time_record_of(one_run: Trainer) -> TimeRecord:
    return TimeRecord(one_run.components, one_run.state, one_run.world, one_run.services, one_run.train_step.marks)


@pytest.mark.parametrize("size", [1, 2])
def test_communication_is_split_but_where_several_ranks_exchange_within_backward_unseen(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    assert not Strategy.exchange_is_timed and DDP.exchange_is_timed and LocalSGD.exchange_is_timed
    monkeypatch.setattr(DDP, "exchange_is_timed", False)
    record = time_record_of(trainer(components("trainer.max_steps=1"), world=replace(alone(), size=size)))
    reason = "DDP exchanges within forward and backward, while they compute"
    assert record.split.seconds() and record._not_split == ({Part.COMMUNICATION: reason} if size > 1 else {})


def test_a_strategy_of_another_base_is_named_by_its_own_class() -> None:
    class Own:
        def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
            return model

    parts = replace(components("trainer.max_steps=1"), strategy=AdaptedStrategy(Own()))
    reason = time_record_of(trainer(parts, world=replace(alone(), size=2)))._not_split[Part.COMMUNICATION]
    assert reason == "Own exchanges within forward and backward, while they compute"


def test_communication_is_not_split_where_batch_norms_exchange_whatever_the_strategy_says() -> None:
    parts = components("trainer.max_steps=1")
    synchronised = nn.ModuleList([*(turn.wrapped for turn in parts.turns.all), nn.SyncBatchNorm(2)])
    parts = replace(parts, turns=Turns(lambda: [Turn(wrapped=synchronised)]))
    reason = time_record_of(trainer(parts, world=replace(alone(), size=2)))._not_split[Part.COMMUNICATION]
    assert reason.startswith("batch norm of all ranks' samples")


def test_a_strategy_has_the_runs_clock_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = list[ExchangeClock]()
    monkeypatch.setattr(DDP, "set_clock", lambda strategy, clock: clocks.append(clock))
    one_run = trainer(components("trainer.max_steps=1"))
    one_run.train()
    (given,) = clocks
    given.begin_in_backward()
    assert given.begin_in_backward() is Part.COMMUNICATION  # the part before
    one_run.end("completed")  # type: ignore[arg-type]
    assert clocks == [given, ExchangeClock()]


def test_what_hides_within_backward_is_no_communication_though_the_strategy_says_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = list[ExchangeClock]()
    monkeypatch.setattr(DDP, "set_clock", lambda strategy, clock: clocks.append(clock))
    monkeypatch.setattr(time_record, "_hidden_exchange", lambda components: "batch norm")
    record = time_record_of(trainer(components("trainer.max_steps=1"), world=replace(alone(), size=2)))
    record._listen()
    assert clocks[0].begin_in_backward() is None  # and no part is left


@pytest.mark.parametrize("part", [Part.FORWARD])
def test_a_mark_costs_little(part: Part) -> None:
    split = TimeSplit()
    started = time.process_time()
    for _ in range(20_000):
        with split.mark(part):
            pass
    assert (time.process_time() - started) / 20_000 < 2e-5  # a tenth of it on a quiet machine


def run(*overrides: str, **services: Any) -> tuple[list[Record], list[Mapping[str, Any]]]:
    records, lines = list[Record](), list[Mapping[str, Any]]()
    one_run = trainer(components(*overrides), write=records.append, write_times=lines.append, log_every_steps=5, **services)
    one_run.train()
    one_run.end("completed")  # type: ignore[arg-type]
    return [record for record in records if record["split"] == "train"], lines


def test_the_parts_of_each_line_sum_to_its_seconds_and_the_lines_to_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()
    train, (head, *lines) = run("trainer.max_steps=20", decide_save=lambda step: step == 10, save=lambda window: time.sleep(0.05))
    assert (head["step"], head["parts"], head["not_split"], len(head["hosts"])) == (0, [*Part], {}, 1)
    assert began <= head["started"] <= time.time()
    assert sum(line["steps"] for line in lines) == 20 and lines[-1]["step"] == 20
    for line in lines:
        assert sum(line["ranks"][0]) == pytest.approx(line["seconds"], rel=0.03, abs=0.01)
    sums = [sum(column) for column in zip(*(line["ranks"][0] for line in lines), strict=True)]
    total = dict(zip(Part, sums, strict=True))
    assert total[Part.CHECKPOINT] > 0.09 and total[Part.EVALUATION] > 0  # saved twice: after the last step, too
    assert [record["step"] for record in train] == [5, 10, 15, 20]


def test_slow_data_is_data_and_a_slow_step_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("trainer.max_steps=10")
    assert parts.train_loader.source is not None
    read = parts.train_loader.source.batch
    monkeypatch.setattr(parts.train_loader.source, "batch", lambda indices: time.sleep(0.02) or read(indices))
    lines = list[Mapping[str, Any]]()
    one_run = trainer(parts, write_times=lines.append, log_every_steps=10)
    one_run.hooks.after_step.append(lambda step: time.sleep(0.01))
    one_run.train()
    seconds = dict(zip(Part, lines[1]["ranks"][0], strict=True))
    assert seconds[Part.DATA] > 0.19 and seconds[Part.OTHER] > 0.09 and seconds[Part.BACKWARD] > 0
    assert sum(seconds.values()) == pytest.approx(lines[1]["seconds"], rel=0.03, abs=0.01)


def test_many_records_are_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_record, "_LINES", 3)
    train, (_, *lines) = run("trainer.max_steps=200")
    assert sum(line["steps"] for line in lines) == train[-1]["step"] and len(lines) < len(train)
    for line in lines:
        assert sum(line["ranks"][0]) == pytest.approx(line["seconds"], rel=0.03, abs=0.01)


def test_what_a_rewind_undoes_before_a_record_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, parts = list[Mapping[str, Any]](), components("trainer.max_steps=20")
    one_run = trainer(parts, write_times=lines.append, log_every_steps=5)

    def rewind_once(step: int) -> None:
        if step == 13:
            one_run.hooks.after_step.remove(rewind_once)
            time.sleep(0.05)
            raise Rewind({}, "bad")

    def go_back(cause: Rewind) -> None:
        one_run.state.jumps.append(Jump(from_step=13, to_step=8, undone=(0, 0)))
        one_run.state.step = 8

    one_run.hooks.after_step.append(rewind_once)
    monkeypatch.setattr(one_run.services.checkpoints, "rewind", go_back)
    one_run.train()
    one_run.end("completed")  # type: ignore[arg-type]
    assert [(line["step"], line["steps"]) for line in lines[1:]] == [(5, 5), (10, 5), (13, 3), (10, 2), (15, 5), (20, 5), (20, 0)]
    assert lines[3]["seconds"] > 0.05 and lines[1]["time"] < lines[3]["time"] < lines[-1]["time"]
    for line in lines[1:]:
        assert sum(line["ranks"][0]) == pytest.approx(line["seconds"], rel=0.03, abs=0.01)


def test_the_run_computes_the_same_numbers_without_it() -> None:
    timed = trainer(components("trainer.max_steps=5"))
    timed.train()
    plain = trainer(components("trainer.max_steps=5"))
    plain.hooks = Hooks()
    plain.train()
    for one, other in zip(timed.components.model.parameters(), plain.components.model.parameters(), strict=True):
        assert torch.equal(one, other)
