"""Where numbers and events go: to rank 0's files and screen, and everywhere to those who listen."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_train.distributed.world import alone
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training.record.records import Records


class Writer:
    """Notes what it is given."""

    def __init__(self, notes: list[Any]) -> None:
        self._notes = notes
        notes.append("opened")

    def write(self, record: Any) -> None:
        self._notes.append(record)

    def close(self) -> None:
        self._notes.append("closed")


def test_a_record_is_heard_before_it_is_written_and_new_writers_go_on_after_a_rewind(tmp_path: Path) -> None:
    notes: list[Any] = []
    records = Records(RunFolder(tmp_path), alone(), lambda: [Writer(notes)])
    records.listen(lambda record: notes.append(f"heard {record['step']}"))
    records.write({"step": 1})
    records.reopen()
    records.write({"step": 2})
    records.close()
    assert notes == ["opened", "heard 1", {"step": 1}, "closed", "opened", "heard 2", {"step": 2}, "closed"]


def test_an_event_is_a_line_of_a_file_and_of_the_screen_on_rank_0_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = RunFolder(tmp_path)
    Records(run_folder, replace(alone(), rank=1), list).log_event({"kind": "spike"}, "a spike")
    assert not run_folder.events.exists()
    records = Records(run_folder, alone(), list)
    records.log_event({"kind": "spike"}, "a spike")
    records.log_event({"kind": "nonfinite"}, "")
    records.close()
    assert [json.loads(line)["kind"] for line in run_folder.events.read_text().splitlines()] == ["spike", "nonfinite"]
    assert capsys.readouterr().out == "a spike\n"


def test_a_full_disk_keeps_events_waiting_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.events.write_text('{"kind": "rewind"}\n{"kind": "sp')  # of an attempt before, which was killed inside a line
    records = Records(run_folder, alone(), list)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # no file grows any more
    try:
        for kind in ("spike", "nonfinite"):
            records.log_event({"kind": kind}, f"a {kind}")
        records.reopen()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    shown = capsys.readouterr().out
    assert shown.count("events.jsonl cannot be written (File too large); training continues, its lines wait in memory") == 1
    assert shown.endswith("a spike\na nonfinite\n")
    records.log_event({"kind": "skipped"}, "")
    assert "events.jsonl is complete again" in capsys.readouterr().out
    records.close()
    kinds = [json.loads(line)["kind"] for line in run_folder.events.read_text().splitlines()]
    assert kinds == ["rewind", "spike", "nonfinite", "skipped"]
