"""What a run records of its time: the parts sum to the wall time, in every record and in times.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ddp_train.run_folder.times import BACKWARD, CHECKPOINT, DATA, EVALUATION, OTHER, PARTS, STEP_PARTS
from ddp_train.training.loop import time_record
from ddp_train.training.record.loss_monitor import Rewind
from ddp_train.training.record.records import Record
from ddp_train.training.record.slow_ranks import Ways
from tests.unit.parts import components, trainer


def run(*overrides: str, **services: Any) -> tuple[list[Record], list[Mapping[str, Any]]]:
    records, lines = list[Record](), list[Mapping[str, Any]]()
    one_run = trainer(components(*overrides), write=records.append, write_times=lines.append, log_every_steps=5, **services)
    one_run.train()
    one_run.end("completed")  # type: ignore[arg-type]
    return [record for record in records if record["split"] == "train"], lines


def test_the_parts_of_each_line_sum_to_its_seconds_and_the_lines_to_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()
    train, (head, *lines) = run("trainer.max_steps=20", decide_save=lambda step: step == 10, save=lambda window: time.sleep(0.05))
    assert (head["step"], head["parts"], head["not_split"], len(head["hosts"])) == (0, PARTS, {}, 1)
    assert began <= head["started"] <= time.time()
    assert sum(line["steps"] for line in lines) == 20 and lines[-1]["step"] == 20
    for line in lines:
        assert sum(line["ranks"][0]) == pytest.approx(line["seconds"], rel=0.03, abs=0.01)
    total = [sum(column) for column in zip(*(line["ranks"][0] for line in lines), strict=True)]
    assert total[CHECKPOINT] > 0.09 and total[EVALUATION] > 0  # saved twice: after the last step, too
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
    seconds = lines[1]["ranks"][0]
    assert seconds[DATA] > 0.19 and seconds[OTHER] > 0.09 and seconds[BACKWARD] > 0
    assert sum(seconds[part] for part in STEP_PARTS) == pytest.approx(lines[1]["seconds"], rel=0.03, abs=0.01)


def test_many_records_are_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_record, "_LINES", 3)
    train, (_, *lines) = run("trainer.max_steps=200")
    assert sum(line["steps"] for line in lines) == train[-1]["step"] and len(lines) < len(train)
    for line in lines:
        assert sum(line["ranks"][0]) == pytest.approx(line["seconds"], rel=0.03, abs=0.01)


def test_what_a_rewind_undoes_before_a_record_is_a_line_of_its_own_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, parts = list[Mapping[str, Any]](), components("trainer.max_steps=20")
    one_run = trainer(parts, write_times=lines.append, log_every_steps=5)

    def rewind_once(step: int) -> None:
        if step == 13:
            one_run.hooks.after_step.remove(rewind_once)
            time.sleep(0.05)
            raise Rewind({}, "bad")

    def go_back(cause: Rewind) -> None:
        one_run.state.step = 8

    one_run.hooks.after_step.append(rewind_once)
    monkeypatch.setattr(one_run.services.checkpoints, "rewind", go_back)
    monkeypatch.setattr(time, "time", lambda: 1e9)  # a clock that is set does not matter
    one_run.train()
    one_run.end("completed")  # type: ignore[arg-type]
    steps = [(line["step"], line["steps"], "lost" in line) for line in lines[1:]]
    assert steps == [(5, 5, False), (10, 5, False), (8, 0, True), (10, 2, False), (15, 5, False), (20, 5, False), (20, 0, False)]
    assert lines[3]["seconds"] > 0.05 and lines[1]["time"] < lines[3]["time"] < lines[-1]["time"]
    for line in lines[1:]:
        assert sum(line["ranks"][0]) == pytest.approx(line["seconds"], rel=0.03, abs=0.01)


def test_the_run_computes_the_same_numbers_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = trainer(components("trainer.max_steps=5"))
    timed.train()
    monkeypatch.setattr(time_record.TimeRecord, "register", lambda record: None)
    plain = trainer(components("trainer.max_steps=5"))
    plain.train()
    for one, other in zip(timed.components.model.parameters(), plain.components.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_slow_network_is_logged_once_and_once_when_that_is_over_and_is_no_report_as_rank_0_alone_knows_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_run, events = trainer(components()), list[Mapping[str, Any]]()
    monkeypatch.setattr(one_run.services.records, "log_event", lambda event, line: events.append(event))
    record = time_record.TimeRecord(one_run)
    record._hosts = ["a", "b", "c"]
    for ways in [Ways(0, {0: 0.0, 1: 0.001, 2: 0.04})] * 2 + [Ways(0, {0: 0.0, 1: 0.001, 2: 0.001})]:
        record._ways = lambda ways=ways: ways
        record._judge([[0.0] * len(PARTS)], 1)
    assert [(each["kind"], each["rank"], each["cause"]) for each in events] == [(f"slow_rank{end}", 2, "network") for end in ("", "_over")]
    assert one_run.reports == []
