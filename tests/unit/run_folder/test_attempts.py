"""A run that starts again and again without getting further is told so, once; who gets anywhere is never."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_train.errors import DataError
from ddp_train.phase import Phase
from ddp_train.run_folder import attempts as progress
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from tests.conftest import wait_for


@pytest.fixture(autouse=True)
def the_clock_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_NOTE_S", 60.0)


def attempt(run_folder: RunFolder, *, steps: int, saves: int | None = None, reports: bool = True, error: Exception | None = None) -> None:
    """Take steps, save, and fail."""
    run_folder.forget_failure()
    run_folder.logs.mkdir(exist_ok=True)
    notes = progress.begin(run_folder)
    for step in range(steps + 1):
        notes(Phase.STEP, step)
    notes.close()
    if saves is not None:
        folder = run_folder.checkpoints / f"step_{saves:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "COMPLETE").touch()
    if reports:
        failure.from_exception(error or ValueError("too large"), rank=1, step=steps).record(run_folder)


def test_the_fourth_failure_at_the_same_step_is_the_last_however_the_run_was_started(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    for number in range(3):
        attempt(run_folder, steps=7, saves=4, reports=number != 1)
        assert progress.count_failure(run_folder, has_failed=number == 0) == ""  # by an agent; by a new command that finds it unfinished
        assert progress.count_failure(run_folder) == ""  # the same attempt is not counted again
    attempt(run_folder, steps=6)
    verdict = progress.count_failure(run_folder)
    assert "started again 3 times from its checkpoint of step 4, and never got beyond step 7" in verdict
    assert verdict.count("ValueError: too large") == 3 and verdict.count("everything ended without a report") == 1
    assert "after step 6" in verdict and "do not requeue" in verdict
    assert len(verdict.splitlines()) <= 15
    assert json.loads(run_folder.result.read_text())["status"] == "failed"
    attempt(run_folder, steps=7)
    assert progress.count_failure(run_folder) == ""  # somebody has started it in spite of that: it counts anew


def test_a_step_further_or_a_new_checkpoint_is_progress(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    for steps, saves in ((7, 4), (7, None), (7, None), (8, None), (8, None), (8, None), (6, 5), (6, None), (6, None)):
        attempt(run_folder, steps=steps, saves=saves)
        assert progress.count_failure(run_folder) == "", (steps, saves)
    attempt(run_folder, steps=6)
    assert progress.count_failure(run_folder) != ""


def test_neither_a_good_end_nor_what_the_user_has_to_mend_counts(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    for _ in range(5):
        attempt(run_folder, steps=0, error=DataError(happened="a file is missing"))
        assert progress.count_failure(run_folder, has_failed=True) == ""
    for _ in range(5):
        attempt(run_folder, steps=3, reports=False)
        progress.end(run_folder, is_saved=False)  # stopped before its first step
        assert progress.count_failure(run_folder) == ""
    assert not run_folder.attempts.exists()


def killed(run_folder: RunFolder, *, steps: int, noted_at: Sequence[int]) -> None:
    """Take steps, with a note after some of them, and end without a word."""
    run_folder.logs.mkdir(exist_ok=True)
    notes = progress.begin(run_folder)
    for step in range(steps + 1):
        notes(Phase.STEP, step)
        if step in noted_at:
            notes.note()
    notes._is_over.set()  # its thread is gone, too


def test_the_folder_is_written_to_by_the_clock_not_by_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: written.append(data) or pwrite(descriptor, data, offset))
    run_folder = RunFolder(tmp_path)
    attempt(run_folder, steps=5000, reports=False)
    assert len(written) == 1  # the last one, as it ends
    assert progress.count_failure(run_folder) == ""
    assert json.loads(run_folder.attempts.read_text())["furthest"] == 5000
    monkeypatch.setattr(progress, "_FIRST_NOTE_S", 0.001)
    notes = progress.begin(run_folder)
    notes(Phase.STEP, 1)
    notes(Phase.STEP, 2)
    wait_for(lambda: run_folder.steps_taken.exists() and run_folder.steps_taken.read_text().split()[0] == "2")
    notes(Phase.END, 2)
    assert run_folder.steps_taken.read_text().split() == ["2", "2"]


def test_a_rewind_leaves_how_far_it_was(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    killed(run_folder, steps=0, noted_at=())
    notes = progress.begin(run_folder)
    for step in (998, 999, 1000, 7, 8):
        notes(Phase.STEP, step)
    notes.close()
    assert run_folder.steps_taken.read_text().split() == ["1000", "1000"]


def test_a_kill_at_the_same_step_is_no_progress_whenever_the_last_note_was(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    verdicts = []
    for late in (80, 50, 20, 1):  # each note is nearer to the step that kills it than the one before
        killed(run_folder, steps=1000, noted_at=range(1000 - late, 0, -100))
        verdicts.append(progress.count_failure(run_folder))
    assert verdicts[:3] == ["", "", ""]
    assert "never got beyond step" in verdicts[3] and "after step 920 to 1217: everything ended" in verdicts[3]


def test_a_killed_run_that_gets_some_seconds_further_makes_progress(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    for number in range(6):
        killed(run_folder, steps=1000 + 500 * number, noted_at=range(50, 4000, 100))
        assert progress.count_failure(run_folder) == ""


def test_slow_steps_are_counted_one_by_one_also_after_a_kill(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    for number in range(6):
        killed(run_folder, steps=3 + number, noted_at=range(100))
        assert progress.count_failure(run_folder) == ""
