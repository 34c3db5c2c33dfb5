"""The host stays within a few steps of its device, and what is known of the device is told; the GPU is simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddp_train.distributed.world import alone
from ddp_train.system.phase import Phases
from ddp_train.training.check import memory
from ddp_train.training.loop.device_queue import STEPS_AHEAD, DeviceQueue
from ddp_train.training.record.log_window import LogWindow
from tests.unit.parts import components, trainer


class Gpu:
    """A device that finishes a step when it is told to, or waited for; events are its `torch.cuda.Event`s."""

    def __init__(self) -> None:
        self.given = self.finished = 0
        self.waits = 0

    def event(self, *, blocking: bool = False, enable_timing: bool = False) -> Event:
        assert blocking != enable_timing  # a host that spins would take a core from the loader's workers
        return Event(self if blocking else Gpu())


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._step = gpu, 0

    def record(self) -> None:
        self._gpu.given += 1
        self._step = self._gpu.given

    def query(self) -> bool:
        return self._gpu.finished >= self._step

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        self._gpu.waits += 1
        self._gpu.finished = max(self._gpu.finished, self._step)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_the_host_is_never_more_than_a_few_steps_ahead_of_a_slow_device(gpu: Gpu) -> None:
    queue = DeviceQueue(Phases())
    ahead = []
    for step in range(1, 101):
        queue.after_step(step)
        ahead.append(step - gpu.finished)
    assert max(ahead) == STEPS_AHEAD
    assert gpu.waits == 100 - STEPS_AHEAD


def test_the_host_never_waits_for_a_device_that_keeps_up(gpu: Gpu) -> None:
    queue = DeviceQueue(Phases())
    for step in range(1, 101):
        gpu.finished = gpu.given
        queue.after_step(step)
    assert gpu.waits == 0


def test_it_is_told_what_the_device_has_finished_and_that_the_host_waits_for_it(gpu: Gpu) -> None:
    phases, told = Phases(), []
    phases.listen_to_device(lambda step, is_awaited: told.append((step, is_awaited)))
    queue = DeviceQueue(phases)
    for step in range(41, 41 + STEPS_AHEAD):  # of a run that was resumed after 40 steps
        queue.after_step(step)
    assert told == [(40, False)] * STEPS_AHEAD
    queue.after_step(41 + STEPS_AHEAD)
    assert told[STEPS_AHEAD:] == [(40, True), (41, False)]
    gpu.finished = gpu.given
    queue.after_step(42 + STEPS_AHEAD)
    assert told[-1] == (41 + STEPS_AHEAD, False)


def test_the_loop_of_a_gpu_marks_the_end_of_every_step(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("trainer.max_steps=3")
    own = alone()
    on_cpu = trainer(parts, log_every_steps=10)
    monkeypatch.setattr(LogWindow, "restart", lambda window, sums: None)
    one_run = trainer(parts, world=replace(own, device=torch.device("cuda", 0)), log_every_steps=10)
    assert len(one_run.hooks.after_step) == len(on_cpu.hooks.after_step) + 1  # on a CPU a step that was taken is done
    monkeypatch.undo()
    monkeypatch.setattr(memory, "print_memory_use", lambda components, world: None)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    one_run.world = one_run.train_step.world = own
    one_run.window._device = own.device
    one_run.train()
    assert gpu.given == 3
