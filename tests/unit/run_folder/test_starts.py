"""A run that starts again and again without a new checkpoint is told so, once; one that saves any is never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_train.errors import DataError
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.starts import MAX_STARTS_WITHOUT_CHECKPOINT, AttemptCount, NoProgress


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def start(run_folder: RunFolder, *, saves: int | None = None, reports: bool = True, error: Exception | None = None) -> None:
    """Begin, save, and fail after step 7."""
    run_folder.archive_failure()
    AttemptCount(run_folder).begin()
    if saves is not None:
        folder = run_folder.checkpoints / f"step_{saves:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "COMPLETE").touch()
    if reports:
        failure.from_exception(error or ValueError("too large"), rank=1, step=7).record(run_folder)


def screen(run_folder: RunFolder, no_progress: NoProgress | None) -> str:
    assert no_progress is not None
    return no_progress.screen(run_folder)


def test_the_third_restart_from_the_same_checkpoint_is_the_last_however_the_run_was_started(run_folder: RunFolder) -> None:
    for number in range(3):
        start(run_folder, saves=4, reports=number != 1)
        count = AttemptCount(run_folder)
        assert (count.fail if number == 0 else count.close_unfinished)() is None  # an agent; a new command
        assert AttemptCount(run_folder).close_unfinished() is None  # the same start is not counted again
    start(run_folder)
    said = screen(run_folder, AttemptCount(run_folder).close_unfinished())
    assert "started again 3 times from its checkpoint of step 4 without a new checkpoint" in said
    assert said.count("ValueError: too large") == 3 and said.count("everything ended without a report") == 1
    assert "after step 7" in said and "do not requeue" in said
    assert len(said.splitlines()) <= 15
    assert json.loads(run_folder.result.read_text())["status"] == "failed"
    start(run_folder)
    assert AttemptCount(run_folder).close_unfinished() is None  # it was started in spite of that: it counts anew


def test_a_new_checkpoint_is_progress(run_folder: RunFolder) -> None:
    for saves in (4, None, None, 5, None, None, 6, None, None):
        start(run_folder, saves=saves)
        assert AttemptCount(run_folder).close_unfinished() is None, saves
    start(run_folder)
    assert "from its checkpoint of step 6" in screen(run_folder, AttemptCount(run_folder).close_unfinished())


def test_neither_a_good_end_nor_what_the_user_has_to_mend_counts(run_folder: RunFolder) -> None:
    for _ in range(5):
        start(run_folder, error=DataError(happened="a file is missing"))
        assert AttemptCount(run_folder).fail() is None
    for _ in range(5):
        start(run_folder, reports=False)
        AttemptCount(run_folder).finish(is_saved=False)  # stopped before its first step
        assert AttemptCount(run_folder).close_unfinished() is None
    assert not run_folder.starts.exists()


def test_a_stop_that_saved_nothing_leaves_the_starts_before_it(run_folder: RunFolder) -> None:
    for _ in range(3):
        start(run_folder, reports=False)
    AttemptCount(run_folder).begin()
    AttemptCount(run_folder).finish(is_saved=False)
    start(run_folder, reports=False)
    assert "started again 3 times from the start" in screen(run_folder, AttemptCount(run_folder).close_unfinished())


def test_the_ranks_start_is_the_one_that_whoever_starts_the_machines_has_counted(run_folder: RunFolder) -> None:
    """A batch script counts before anything else may be killed."""
    for number in range(MAX_STARTS_WITHOUT_CHECKPOINT):
        assert AttemptCount(run_folder).close_before_requeue() is None
        AttemptCount(run_folder).begin_under_engine()
        assert AttemptCount(run_folder).close_unfinished() is None  # the first machine asks, before the ranks start
        if number % 2:
            AttemptCount(run_folder).begin()
        assert len(json.loads(run_folder.starts.read_text())["began"]) == number + 1
    assert "everything ended without a report" in screen(run_folder, AttemptCount(run_folder).close_before_requeue())


def test_what_fails_before_rank_0_could_count_counts(run_folder: RunFolder) -> None:
    said = [AttemptCount(run_folder).fail() for _ in range(MAX_STARTS_WITHOUT_CHECKPOINT)]
    assert said[:-1] == [None] * (len(said) - 1) and said[-1] is not None


def test_an_engine_s_start_counts_however_it_was_stopped(run_folder: RunFolder) -> None:
    """A walltime that is too short for a first step would have the job requeued for ever."""
    for _ in range(MAX_STARTS_WITHOUT_CHECKPOINT):
        assert AttemptCount(run_folder).close_before_requeue() is None
        AttemptCount(run_folder).begin_under_engine()
        for _ in range(2):  # a machine has come
            AttemptCount(run_folder).begin()
            AttemptCount(run_folder).finish(is_saved=False)
    assert AttemptCount(run_folder).close_before_requeue() is not None
