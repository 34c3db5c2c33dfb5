"""Windows of steps that are recorded: which steps, by whom, what is in the files, and what is left when nothing is recorded."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_train.distributed.world import World, alone
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.profile import Profiler, Trace, covered_ms, table
from ddp_train.training.record.records import Record
from ddp_train.training.train_state import TrainState
from tests.unit.parts import ChosenStop, checked, components, trainer


def run(
    folder: Path, *overrides: str, state: TrainState | None = None, world: World | None = None, **changes: Any
) -> tuple[Trainer, list[Record]]:
    """Train as a run in this folder does, on this rank alone; steps are not many."""
    words = ["trainer.max_steps=12", "trainer.max_epochs=null", "data.num_samples=64", *overrides]
    records: list[Record] = []
    settings: dict[str, Any] = {"log_every_steps": 4, "write": records.append, **changes}
    one_run = trainer(components(*words), state, world, profile=checked(*words).profile, run_folder=RunFolder(folder), **settings)
    one_run.train()
    one_run.end(Status.COMPLETED)
    return one_run, records


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profile").glob("*"))


def trace(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / "profile" / f"{name}.pt.trace.json.gz", "rt") as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


def steps_of(folder: Path, name: str) -> list[int]:
    marks = {event["name"] for event in trace(folder, name) if event["name"].startswith("ProfilerStep#")}
    return sorted(int(mark.removeprefix("ProfilerStep#")) for mark in marks)


WINDOW = ["profile=trace", "profile.start_step=3", "profile.steps=2"]


def test_a_recording_is_a_trace_of_these_steps_with_their_parts_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, *WINDOW, decide_save=lambda step: step == 4, evaluate_every_steps=5)
    assert files(tmp_path) == ["rank_00000_step_000003.pt.trace.json.gz", "rank_00000_step_000003.txt"]
    events = trace(tmp_path, "rank_00000_step_000003")
    assert steps_of(tmp_path, "rank_00000_step_000003") == [4, 5]
    begun = [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0.0)) if event.get("cat") == "user_annotation"]
    parts = [name for name in begun if "#" not in name and name != "communication"]
    assert parts == ["data", "forward", "backward", "optimizer", "save", "data", "forward", "backward", "optimizer", "evaluation"]
    assert sum(name.startswith("Optimizer.step#") for name in begun) == 2
    inside = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    product = next(event for event in events if event["name"] == "aten::addmm" and event["ts"] > inside["forward"]["ts"])
    assert product["ts"] + product["dur"] <= inside["forward"]["ts"] + inside["forward"]["dur"]
    table = (tmp_path / "profile/rank_00000_step_000003.txt").read_text()
    assert table.startswith("2 steps, ") and "aten::addmm" in table and "communication: none" in table and "ProfilerStep" not in table
    assert len(table.splitlines()) < 28 and max(map(len, table.splitlines())) <= 130  # one screen
    assert table in capsys.readouterr().out


def test_off_nothing_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "begin_step", lambda *arguments: pytest.fail("the loop has told of a step"))
    run(tmp_path)
    assert files(tmp_path) == []


def test_steps_are_those_of_this_start_also_after_a_resume(tmp_path: Path) -> None:
    run(tmp_path, *WINDOW, state=TrainState(step=5, position=5 * 32))
    assert steps_of(tmp_path, "rank_00000_step_000008") == [9, 10]


def test_the_first_step_can_be_recorded(tmp_path: Path) -> None:
    run(tmp_path, *WINDOW, "profile.start_step=0")
    assert steps_of(tmp_path, "rank_00000_step_000000") == [1, 2]


def test_ranks_that_are_not_chosen_record_nothing(tmp_path: Path) -> None:
    other = replace(alone(), rank=1)
    config = checked("profile=trace", "profile.start_step=0", "profile.steps=1")
    hooks = trainer(components(), world=other, profile=config.profile, run_folder=RunFolder(tmp_path)).hooks
    [watch] = hooks.before_step
    for step in range(2):
        assert watch.is_on
        watch.begin_step(step)
    assert files(tmp_path) == [] and not watch.is_on


def test_the_run_computes_the_same_and_leaves_no_mark(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain")
    recorded, _ = run(tmp_path / "recorded", *WINDOW)
    for one, other in zip(plain.components.model.parameters(), recorded.components.model.parameters(), strict=True):
        assert torch.equal(one, other)
    parts = recorded.components
    assert not {"loss", "backward"} & vars(recorded.train_step).keys()
    assert not parts.optimizer._optimizer_step_pre_hooks and not parts.optimizer._optimizer_step_post_hooks
    assert len(recorded.services.phases._listeners) == len(plain.services.phases._listeners)


def test_the_next_job_of_the_same_process_records_nothing(tmp_path: Path) -> None:
    run(tmp_path / "0", *WINDOW)
    run(tmp_path / "1")
    assert files(tmp_path / "0") != [] and files(tmp_path / "1") == []


def test_writing_is_no_steps_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, clock, late_s = Trace.end, time.perf_counter, list[float]()

    def slow(self: Trace) -> str:
        late_s.append(1e6)
        return end(self)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(late_s))
    monkeypatch.setattr(Trace, "end", slow)
    _, records = run(tmp_path, *WINDOW)
    train = [record for record in records if record["split"] == "train"]
    assert late_s and max(max(record["step_ms"], record["data_wait_ms"]) for record in train) < 1e5


def test_a_file_in_the_folder_asks_for_a_recording_after_the_next_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.request").touch()
    run(tmp_path, "profile.steps=3")
    assert steps_of(tmp_path, "rank_00000_step_000005") == [6, 7, 8]  # the record is step 4's, and a step warms up
    assert not (tmp_path / "profile.request").exists()
    assert "profile  steps 6 to 8 are recorded on rank 0: " in capsys.readouterr().out


def test_a_request_beside_a_scheduled_recording_is_ignored_and_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.request").touch()
    run(tmp_path, "profile=trace", "profile.start_step=9", "profile.steps=1")
    assert "profile.request is ignored: another profile is scheduled already" in capsys.readouterr().out
    assert not (tmp_path / "profile.request").exists() and steps_of(tmp_path, "rank_00000_step_000009") == [10]


def test_a_recording_that_never_comes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "profile=trace", "profile.start_step=9", "profile.steps=1", stop=ChosenStop(2))
    assert "nothing was recorded: the run took 2 steps, and 9 come before the window" in capsys.readouterr().out


def test_a_run_that_ends_within_its_recording_keeps_what_there_is(tmp_path: Path) -> None:
    run(tmp_path, *WINDOW, "profile.steps=100", stop=ChosenStop(6))
    assert steps_of(tmp_path, "rank_00000_step_000003") == [4, 5, 6]


@pytest.mark.parametrize("breaks", ["start", "write"])
def test_a_recording_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: str
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("ddp_train.training.profile.Trace" if breaks == "start" else "ddp_train.training.profile.appears_whole", fail)
    one_run, _ = run(tmp_path, *WINDOW)
    assert one_run.state.step == 12
    assert "rank 0 records no profile: OSError: No space left on device" in caplog.text
    assert not {"loss", "backward"} & vars(one_run.train_step).keys()


def test_memory_on_a_cpu_is_told_by_operator(tmp_path: Path) -> None:
    run(tmp_path, *WINDOW, "profile=memory")
    assert files(tmp_path) == ["rank_00000_step_000003.pt.trace.json.gz", "rank_00000_step_000003.txt"]
    assert any(event["name"] == "[memory]" for event in trace(tmp_path, "rank_00000_step_000003"))
    assert "Self CPU Mem" in (tmp_path / "profile/rank_00000_step_000003.txt").read_text()


def test_every_micro_batch_is_marked(tmp_path: Path) -> None:
    run(tmp_path, *WINDOW, "profile.steps=1", "trainer.global_batch_size=32", "loader.micro_batch_size=16")
    parts = [event["name"] for event in trace(tmp_path, "rank_00000_step_000003") if event.get("cat") == "user_annotation"]
    assert [parts.count(name) for name in ("data", "forward", "backward", "optimizer")] == [2, 2, 2, 1]


# The table, of events whose times a hand can add up.


@dataclass
class Event:
    name: str
    start: float
    stop: float
    device: str = "CPU"
    is_user_annotation: bool = False

    @property
    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.device)

    @property
    def time_range(self) -> SimpleNamespace:
        return SimpleNamespace(start=self.start, end=self.stop)


def mark(name: str, start: float, stop: float, **other: object) -> Event:
    return Event(name, start, stop, is_user_annotation=True, **other)  # type: ignore[arg-type]


STEPS = [mark("ProfilerStep#11", 0, 6000), mark("ProfilerStep#12", 6000, 10000), mark("forward", 100, 2100), mark("backward", 2100, 5100)]


def test_parts_are_told_a_step_and_operators_by_torch() -> None:
    lines = table([*STEPS, Event("aten::mm", 0, 10)], "all of them\n").splitlines()
    assert lines[:2] == ["2 steps, 5.000 ms each, ms a step:", "  forward 1.000  backward 1.500"]
    assert lines[3:5] == ["operators in all 2 steps:", "all of them"]


def test_communication_on_the_host_is_added_up_once() -> None:
    gloo = [mark("gloo:all_reduce", 0, 2000), mark("gloo:all_reduce", 1000, 4000)]
    assert table([*STEPS, *gloo], "").endswith("communication: 2.000 ms a step")
    assert table(STEPS, "").endswith("communication: none")


def test_on_a_gpu_what_runs_beside_computing_is_told() -> None:
    kernels = [
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1000, 3000, "CUDA"),
        Event("ampere_sgemm_128x64", 0, 1500, "CUDA"),
        Event("elementwise", 2000, 2500, "CUDA"),
        mark("backward", 0, 9000, device="CUDA"),  # the shadow of the host's name
    ]
    assert table([*STEPS, *kernels], "").endswith("communication: 1.000 ms a step, 50% of it overlapped with computing")


def test_times_that_overlap_count_once() -> None:
    assert covered_ms([Event("", *times) for times in ((5000, 6000), (0, 2000), (1000, 3000), (3000, 4000), (500, 600))]) == 5
