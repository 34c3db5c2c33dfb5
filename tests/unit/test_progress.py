"""A run that starts again and again without getting further is told so, once; who gets anywhere is never."""

from __future__ import annotations

import json
from pathlib import Path

from ddp_train import failure, progress
from ddp_train.errors import DataError
from ddp_train.pulse import Phase
from ddp_train.run_dir import RunDir


def attempt(run_dir: RunDir, *, steps: int, saves: int | None = None, reports: bool = True, error: Exception | None = None) -> None:
    """Take steps, save, and fail."""
    run_dir.forget_failure()
    run_dir.logs.mkdir(exist_ok=True)
    note = progress.begin(run_dir)
    for step in range(steps + 1):
        note(Phase.STEP, step)
    note(Phase.END, steps)
    if saves is not None:
        folder = run_dir.checkpoints / f"step_{saves:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "COMPLETE").touch()
    if reports:
        failure.from_exception(error or ValueError("too large"), rank=1, step=steps).record(run_dir)


def test_the_fourth_failure_at_the_same_step_is_the_last_however_the_run_was_started(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for number in range(3):
        attempt(run_dir, steps=7, saves=4, reports=number != 1)
        assert progress.settle(run_dir, has_failed=number == 0) == ""  # by an agent; by a new command that finds it unfinished
        assert progress.settle(run_dir) == ""  # the same attempt is not counted again
    attempt(run_dir, steps=6)
    verdict = progress.settle(run_dir)
    assert "started again 3 times from its checkpoint of step 4, and never got beyond step 7" in verdict
    assert verdict.count("ValueError: too large") == 3 and verdict.count("everything ended without a report") == 1
    assert "after step 6" in verdict and "do not requeue" in verdict
    assert len(verdict.splitlines()) <= 15
    assert json.loads(run_dir.result.read_text())["status"] == "failed"
    attempt(run_dir, steps=7)
    assert progress.settle(run_dir) == ""  # somebody has started it in spite of that: it counts anew


def test_a_step_further_or_a_new_checkpoint_is_progress(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for steps, saves in ((7, 4), (7, None), (7, None), (8, None), (8, None), (8, None), (6, 5), (6, None), (6, None)):
        attempt(run_dir, steps=steps, saves=saves)
        assert progress.settle(run_dir) == "", (steps, saves)
    attempt(run_dir, steps=6)
    assert progress.settle(run_dir) != ""


def test_neither_a_good_end_nor_what_the_user_has_to_mend_counts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for _ in range(5):
        attempt(run_dir, steps=0, error=DataError(happened="a file is missing"))
        assert progress.settle(run_dir, has_failed=True) == ""
    for _ in range(5):
        attempt(run_dir, steps=3, reports=False)
        progress.end(run_dir, is_saved=False)  # stopped before its first step
        assert progress.settle(run_dir) == ""
    assert not run_dir.attempts.exists()
