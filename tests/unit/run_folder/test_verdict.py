"""Done, again or never, from what lies in the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.errors import ConfigError, DataError, EnvironmentRefuses
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.verdict import Outcome, code_of_stop, mark_cancelled, note_refusal, verdict_after_end, verdict_of


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def ended(run_folder: RunFolder, status: Status, **facts: int) -> None:
    Result(status=status, **facts).write(run_folder.result)


def failed(run_folder: RunFolder, error: Exception) -> None:
    failure.from_exception(error, rank=1, step=3).record(run_folder)


def save(run_folder: RunFolder, step: int) -> None:
    folder = run_folder.checkpoints / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()


def test_completed_is_done_whatever_else_lies_there(run_folder: RunFolder) -> None:
    failed(run_folder, DataError(happened="of an attempt before"))
    mark_cancelled(run_folder)
    ended(run_folder, Status.COMPLETED)
    assert verdict_of(run_folder) == (Outcome.DONE, "", 0)
    assert str(verdict_of(run_folder)) == "done"


def test_stopped_in_good_order_is_started_again_from_what_was_saved(run_folder: RunFolder) -> None:
    ended(run_folder, Status.PREEMPTED)
    assert str(verdict_of(run_folder)) == "again: stopped in good order; it continues from the start"
    save(run_folder, 7)
    assert verdict_of(run_folder).reason.endswith("continues from step 7") and verdict_of(run_folder).exit_code == 75


def test_ctrl_c_is_a_person_s_word(run_folder: RunFolder) -> None:
    ended(run_folder, Status.INTERRUPTED, step=7)
    assert (verdict_of(run_folder).outcome, verdict_of(run_folder).exit_code) == (Outcome.NEVER, 130)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(happened="the node's fault"), 2),
        (DataError(happened="a file is missing"), 2),
        (EnvironmentRefuses(happened="no GPU"), 78),
    ],
)
def test_what_a_person_has_to_mend_is_never_started_again(run_folder: RunFolder, error: Exception, code: int) -> None:
    failed(run_folder, error)
    verdict = verdict_of(run_folder)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.NEVER, code)
    assert str(error) in verdict.reason and "rank 1 on" in verdict.reason


def test_a_failure_is_tried_again_until_it_gets_nowhere(run_folder: RunFolder) -> None:
    verdicts = []
    for _ in range(4):
        run_folder.archive_failure()
        AttemptCount(run_folder).begin()
        failed(run_folder, ValueError("too large"))
        AttemptCount(run_folder).fail()
        verdicts.append(verdict_of(run_folder))
    assert [each.exit_code for each in verdicts] == [75, 75, 75, 93]
    assert all("ValueError: too large" in each.reason for each in verdicts)


def test_cancelled_is_never_until_somebody_asks_for_it_again(run_folder: RunFolder) -> None:
    ended(run_folder, Status.PREEMPTED, step=7)
    mark_cancelled(run_folder)
    verdict = verdict_of(run_folder)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.NEVER, 130) and "cancelled by " in verdict.reason
    run_folder.cancelled.write_text("{")  # a disk that was full
    assert verdict_of(run_folder).outcome == Outcome.NEVER
    run_folder.cancelled.unlink()
    assert verdict_of(run_folder).outcome == Outcome.AGAIN


def test_damaged_files_are_no_word(run_folder: RunFolder) -> None:
    for path in (run_folder.result, run_folder.failure, run_folder.starts):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{")
    assert verdict_of(run_folder).outcome == Outcome.AGAIN


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (78, 78), (93, 93), (126, 78), (127, 78), (1, 75), (137, 75), (143, 75)])
def test_a_machine_that_could_leave_nothing_has_said_it_with_its_exit_code(run_folder: RunFolder, code: int, expected: int) -> None:
    AttemptCount(run_folder).begin_under_engine()
    ended(run_folder, Status.PREEMPTED)  # by the others, which were stopped for it
    note_refusal(run_folder, code, logs="the logs x", is_elastic=False)
    verdict = verdict_of(run_folder)
    assert verdict.exit_code == expected
    assert verdict.outcome == Outcome.AGAIN or f"a machine refused (exit code {expected}); see the logs x" in verdict.reason


def test_the_word_of_those_that_went_on_without_it_counts_in_an_elastic_run(run_folder: RunFolder) -> None:
    ended(run_folder, Status.PREEMPTED, step=5)
    AttemptCount(run_folder).begin_under_engine()
    note_refusal(run_folder, 78, logs="x", is_elastic=True)
    assert verdict_of(run_folder).exit_code == 78  # what lay there was of the life before
    run_folder.archive_failure()
    AttemptCount(run_folder).begin_under_engine()
    ended(run_folder, Status.PREEMPTED, step=7)
    note_refusal(run_folder, 78, logs="x", is_elastic=True)
    assert verdict_of(run_folder).outcome == Outcome.AGAIN


def test_what_is_completed_or_cancelled_stays_so(run_folder: RunFolder) -> None:
    mark_cancelled(run_folder)
    note_refusal(run_folder, 78, logs="x", is_elastic=False)
    assert verdict_of(run_folder).exit_code == 130
    ended(run_folder, Status.COMPLETED)
    note_refusal(run_folder, 78, logs="x", is_elastic=False)
    assert verdict_of(run_folder).outcome == Outcome.DONE


def test_who_has_followed_a_run_ends_as_it_did(run_folder: RunFolder) -> None:
    assert verdict_after_end(run_folder, within_s=0.0)[1] == 1  # there is no result.json
    failed(run_folder, ValueError("too large"))
    assert verdict_after_end(run_folder)[1] == 1 and verdict_of(run_folder).outcome == Outcome.AGAIN
    run_folder.archive_failure()
    ended(run_folder, Status.PREEMPTED)
    assert verdict_after_end(run_folder)[1] == 143
    assert code_of_stop(run_folder, in_sweep=True) == 75  # the sweep begins it again
    save(run_folder, 7)
    assert verdict_after_end(run_folder)[1] == 75
    mark_cancelled(run_folder)
    assert verdict_after_end(run_folder)[1] == 130
