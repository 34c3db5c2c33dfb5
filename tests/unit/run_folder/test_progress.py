"""How far a run is, from what it has written; and its logs as they grow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ddp_train.run_folder import progress as module
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import LogTail, batch_notes, evaluation_line, live_notes, newest_record, progress_line
from ddp_train.system.phase import Part


def test_the_newest_record_counts(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.logs.mkdir()
    assert newest_record(run_folder) == {}
    train = {"split": "train", "step": 2, "loss": 1.5, "step_ms": 250, "epoch": 0.1, "tokens_per_s": 9.5, "mfu": 0.5}
    run_folder.metrics.write_text(json.dumps(train) + '\n{"split": "eval", "step": 2}\n{"split"')
    assert newest_record(run_folder) == train


def test_a_terminal_is_told_what_the_files_of_a_run_have(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    assert live_notes(run_folder, {}, restarts=0) == []
    first = json.dumps({"attempt": 1, "started": 0.0})
    run_folder.times.write_text(first)
    assert live_notes(run_folder, {}, restarts=0) == []
    ranks = [[3.0, 1.0, 5.0, None, 0.5, 0.0, 0.0, 0.5], [1.0, 3.0, 5.0, None, 0.5, 0.0, 0.0, 0.5]]
    run_folder.times.write_text(f"{first}\n{json.dumps({'step': 5, 'parts': [*Part], 'ranks': ranks})}\n")
    (run_folder.checkpoints / "step_00000004").mkdir(parents=True)
    slow = {"kind": "slow_rank", "step": 3, "host": "node1", "text": "rank 1 is slow"}
    events = [{**slow, "rank": 1}, {**slow, "rank": 0}, {"kind": "slow_rank_over", "rank": 0, "step": 4, "text": "over"}]
    run_folder.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert live_notes(run_folder, {"eval/accuracy": (0.5, 4)}, restarts=2) == [
        "best     accuracy 0.5 at step 4",
        "time     ████████████▓▓▓▓▓▒▒▒▒▒░   █ backward 50%  ▓ data 20%  ▒ forward 20%  ░ optimizer 5%",
        "saved    step 4, 0 s ago",
        "restarts 2",
        "slow     step 3: rank 1 is slow",
    ]


def test_it_is_said_in_one_line_with_what_is_known() -> None:
    far = {"step": 40, "epoch": 1.5, "loss": 0.51234, "step_ms": 500}
    assert progress_line(far, max_steps=100, max_epochs=None) == "step 40 of 100, loss 0.5123, 2 steps/s, 30 s left"
    assert progress_line(far, max_steps=None, max_epochs=3) == "step 40, epoch 1.50 of 3, loss 0.5123, 2 steps/s"
    fast = {"step": 40, "epoch": None, "step_ms": 500, "tokens_per_s": 51200.4, "mfu": 0.41}
    assert progress_line(fast, max_steps=None, max_epochs=None) == "step 40, 2 steps/s, 51,200 tokens/s, MFU 41.0%"
    assert progress_line(far, max_steps=100_000, max_epochs=None).endswith("13.9 h left")
    assert progress_line({"step": 1, "loss": None}, max_steps=100, max_epochs=None) == "step 1 of 100"


def test_how_far_an_evaluation_is_is_noted_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.logs.mkdir()
    assert evaluation_line(run_folder) == ""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    note_batch, lines = batch_notes(run_folder, step=7, num_batches=12), list[str]()
    for _ in range(13):  # the last time says that all are done
        note_batch()
        lines.append(evaluation_line(run_folder))
        now += 0.4
    assert lines[0] == lines[1] == lines[2] == "checkpoint of step 7, batch 0 of 12"
    assert lines[3] == "checkpoint of step 7, batch 3 of 12, 2.5 batches/s, 4 s left"
    assert lines[-1] == "checkpoint of step 7, batch 12 of 12, 2.5 batches/s"
    run_folder.batches.write_text(json.dumps({"step": 7, "done": 3, "of": None, "seconds": 1}))
    assert evaluation_line(run_folder) == "checkpoint of step 7, batch 3, 3 batches/s"


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
    monkeypatch.setattr(module, "_CHUNK", 8)
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
