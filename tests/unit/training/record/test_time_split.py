"""The parts of a rank's time do not overlap and sum to the wall time; on a device, which is simulated, they are those of its own clock."""

from __future__ import annotations

import gc
import time
from collections import deque
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.run_folder.times import BACKWARD, CHECKPOINT, COMMUNICATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER
from ddp_train.system.phase import Phase
from ddp_train.training.record import time_split
from ddp_train.training.record.time_split import DeviceTimeSplit, TimeSplit, _Exchange, why_not_split


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_split.time, "perf_counter", clock)
    return clock


def test_a_part_within_another_one_is_not_counted_to_it_and_all_sum_to_the_wall_time(clock: Clock) -> None:
    split = TimeSplit()
    clock.now = 100.0
    split.begin()
    for phase, seconds in ((Phase.DATA, 1.0), (Phase.STEP, 2.0)):
        split.enter_phase(phase, 0)
        clock.now += seconds
    with split.mark("forward"):
        clock.now += 4.0
        with split.mark("communication"), split.mark("communication"):
            clock.now += 8.0
        clock.now += 16.0
    with split.mark("optimizer"):
        clock.now += 32.0
    split.enter_phase(Phase.EVALUATION, 1)
    clock.now += 64.0
    split.enter_phase(Phase.SAVE, 1)
    clock.now += 128.0
    seconds = split.take()
    expected = {
        DATA: 1.0,
        OTHER: 2.0,
        FORWARD: 20.0,
        COMMUNICATION: 8.0,
        OPTIMIZER: 32.0,
        EVALUATION: 64.0,
        CHECKPOINT: 128.0,
        BACKWARD: 0.0,
    }
    assert seconds == [expected[part] for part in range(len(seconds))]
    assert sum(seconds) == clock.now - 100.0
    assert sum(split.take()) == 0.0


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
    split = DeviceTimeSplit(device.event)
    device.now = 10.0
    split.begin()
    with split.mark("forward"):
        device.now += 1.0
    with split.mark("backward"):
        device.now += 2.0
    device.finished = 11.0  # it is still in backward
    assert split.take()[FORWARD] == 1.0
    device.finished = device.now
    rest = split.take()
    assert (rest[FORWARD], rest[BACKWARD], sum(rest)) == (0.0, 2.0, 2.0)


def test_events_are_used_again() -> None:
    device, made = Device(), deque[Event]()

    def new_event() -> Event:
        made.append(device.event())
        return made[-1]

    split = DeviceTimeSplit(new_event)
    split.begin()
    for _ in range(5000):
        with split.mark("forward"):
            device.now += 1.0
        device.finished = device.now
    assert split.take()[FORWARD] == 5000.0
    assert len(made) < 2000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: Tensor, *, skips: bool = False) -> Tensor:
        return self.second(inputs if skips else self.first(inputs)).sum()


def test_the_last_gradient_of_the_exchanging_backward_is_found_and_found_again_where_another_one_is_the_last() -> None:
    net, calls = Net(), list[str]()
    exchange = _Exchange(net, lambda: calls.append("last"))

    def step(*, skips: bool = False, exchanges: bool = True) -> int:
        before = len(calls)
        if exchanges:
            with exchange:
                net(torch.ones(1, 2), skips=skips).backward()
        else:
            net(torch.ones(1, 2), skips=skips).backward()
        return len(calls) - before

    assert [step(), step(), step(exchanges=False), step()] == [0, 1, 0, 1]  # the first one looks which it is
    assert [step(skips=True), step(skips=True), step(skips=True)] == [0, 0, 1]  # not split; looks; found

    def hooked() -> list[Tensor]:
        return [parameter for parameter in net.parameters() if parameter._post_accumulate_grad_hooks]

    [last] = hooked()
    assert last in set(net.second.parameters())
    exchange.end()
    assert hooked() == []


def test_a_module_whose_hook_is_left_can_be_collected() -> None:
    net = Net()
    exchange = _Exchange(net, lambda: None)
    for _ in range(2):
        with exchange:
            net(torch.ones(1, 2)).backward()
    parameters = [ref(each) for each in net.parameters()]
    del net, exchange
    gc.collect()
    assert [each() for each in parameters] == [None] * 4


def test_only_torchs_ddp_has_a_last_reduction() -> None:
    assert not isinstance(TimeSplit().exchange(Net()), _Exchange)
    assert issubclass(DistributedDataParallel, nn.Module)


def test_communication_is_not_split_where_ranks_wait_within_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

    monkeypatch.setattr(time_split, "DistributedDataParallel", Wrapped)
    two, one = SimpleNamespace(size=2), SimpleNamespace(size=1)

    def why(world: Any, *modules: nn.Module, local_weights: Any = None) -> dict[str, str]:
        return why_not_split(SimpleNamespace(local_weights=local_weights), modules, world)  # type: ignore[arg-type]

    norm = nn.SyncBatchNorm(2)
    assert why(two, Wrapped(Net())) == why(two, Wrapped(Net()), Wrapped(Net())) == why(two, Net(), local_weights=1) == why(one, norm) == {}
    assert "SimpleNamespace" in why(two, Wrapped(Net()), Net())["communication"]
    assert "batch norm" in why(two, Wrapped(norm))["communication"] == why(two, norm, local_weights=1)["communication"]


@pytest.mark.parametrize("part", ["forward"])
def test_a_mark_costs_little(part: str) -> None:
    split = TimeSplit()
    started = time.process_time()
    for _ in range(20_000):
        with split.mark(part):
            pass
    assert (time.process_time() - started) / 20_000 < 2e-5  # a tenth of it on a quiet machine
