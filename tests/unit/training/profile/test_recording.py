"""The table of a window, of events whose times a hand can add up."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from ddp_train.training.profile.recording import covered_ms, table


@dataclass
class Event:
    name: str
    start: float
    stop: float
    device: str = "CPU"
    is_user_annotation: bool = False
    is_async: bool = False
    self_cpu_time_total: float = 0.0
    self_device_time_total: float = 0.0

    @property
    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.device)

    @property
    def time_range(self) -> SimpleNamespace:
        return SimpleNamespace(start=self.start, end=self.stop)


def mark(name: str, start: float, stop: float, **other: object) -> Event:
    return Event(name, start, stop, is_user_annotation=True, **other)  # type: ignore[arg-type]


STEPS = [mark("ProfilerStep#11", 0, 6000), mark("ProfilerStep#12", 6000, 10000), mark("forward", 100, 2100), mark("backward", 2100, 5100)]
OPERATORS = [
    Event("aten::mm", 0, 10, self_cpu_time_total=300, self_device_time_total=4000),
    Event("aten::mm", 0, 10, self_cpu_time_total=100, self_device_time_total=2000),
    Event("aten::add", 0, 10, self_cpu_time_total=1000, self_device_time_total=2000),
]


def test_parts_and_operators_are_told_a_step() -> None:
    lines = table([*STEPS, *OPERATORS, Event("[memory]", 0, 0, self_cpu_time_total=9e9)]).splitlines()
    assert lines[:2] == ["2 steps, 5.000 ms each, ms a step:", "  forward 1.000  backward 1.500"]
    first, second = (line.split() for line in lines[5:7])
    assert first == ["aten::mm", "1", "0.200", "3.000", "75.0%"]  # by the GPU's time where there is some
    assert second == ["aten::add", "0.5", "0.500", "1.000", "25.0%"]


def test_without_a_gpu_the_hosts_time_counts() -> None:
    events = [Event(each.name, 0, 10, self_cpu_time_total=each.self_cpu_time_total) for each in OPERATORS]
    names = [line.split()[0] for line in table([*STEPS, *events]).splitlines() if line.startswith("aten")]
    assert names == ["aten::add", "aten::mm"]


def test_communication_on_the_host_is_added_up_once() -> None:
    gloo = [mark("gloo:all_reduce", 0, 2000, is_async=True), mark("gloo:all_reduce", 1000, 4000, is_async=True)]
    assert table([*STEPS, *gloo]).endswith("communication: 2.000 ms a step")
    assert table(STEPS).endswith("communication: none")


def test_on_a_gpu_what_runs_beside_computing_is_told() -> None:
    kernels = [
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1000, 3000, "CUDA"),
        Event("ampere_sgemm_128x64", 0, 1500, "CUDA"),
        Event("elementwise", 2000, 2500, "CUDA"),
        mark("backward", 0, 9000, device="CUDA"),  # the shadow of the host's name
    ]
    assert table([*STEPS, *kernels]).endswith("communication: 1.000 ms a step, 50% of it beside computing")


def test_times_that_overlap_count_once() -> None:
    assert covered_ms([Event("", *times) for times in ((5000, 6000), (0, 2000), (1000, 3000), (3000, 4000), (500, 600))]) == 5
