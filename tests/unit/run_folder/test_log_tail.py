"""The logs of a run as they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.run_folder import log_tail
from ddp_train.run_folder.log_tail import LogTail
from ddp_train.run_folder.paths import RunFolder


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def add(run_folder: RunFolder, name: str, text: str) -> None:
    with (run_folder.logs / name).open("a") as file:
        file.write(text)


def test_whole_lines_that_are_added_also_to_files_that_are_new(run_folder: RunFolder) -> None:
    add(run_folder, "slurm-7.out", "before\n")
    tail = LogTail(run_folder)
    assert tail.lines() == []
    add(run_folder, "slurm-7.out", "one\ntw")
    add(run_folder, "slurm-7-node1.out", "first\n")
    assert tail.lines() == ["one", "first"]
    add(run_folder, "slurm-7.out", "o\n")
    add(run_folder, "slurm-7-node2.out", "other\x1b[2J\n")
    assert tail.lines() == ["two", "node2: other\\x1b[2J"]


def test_a_line_that_does_not_end_holds_nothing_up(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "_CHUNK", 8)
    tail = LogTail(run_folder)
    add(run_folder, "slurm-7.out", "1%\r2%\r3%\r4%\ndone\n")
    shown = tail.lines() + tail.lines() + tail.lines()
    assert shown[0] == "1%" and shown[-1] == "done"


def test_of_several_jobs_the_newest_speaks(run_folder: RunFolder) -> None:
    for job in (9, 10):
        add(run_folder, f"slurm-{job}.out", f"{job}\n")
    assert LogTail(run_folder, last=1000).lines() == ["10"]


def test_a_run_without_an_engine_has_the_log_of_rank_0(run_folder: RunFolder) -> None:
    add(run_folder, "rank_00000.log", "a\nb\n")
    assert LogTail(run_folder, last=2).lines() == ["b"]
