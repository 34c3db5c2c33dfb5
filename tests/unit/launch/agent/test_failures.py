"""What an agent makes of ranks that have failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_train.launch.agent.failures import FailureHandler, FailuresOfAttempt, FailuresOfRun
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.verdict import exit_code_after_agent

DIED = {1: ProcessFailure(local_rank=1, pid=7, exitcode=-11, error_file="")}


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.PREEMPTED, Status.FAILED])
@pytest.mark.parametrize("is_one_attempt", [False, True])
def test_a_rank_that_dies_after_the_end_of_the_run_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], status: Status, is_one_attempt: bool
) -> None:
    run_folder = RunFolder(tmp_path)
    before = Result(status=Status.COMPLETED, step=3)
    before.write(run_folder.result)
    failures: FailureHandler = FailuresOfRun(run_folder, in_sweep=False)
    if is_one_attempt:
        failures = FailuresOfAttempt(run_folder, is_last=False)
    Result(status=status, step=8).write(run_folder.result)
    starts_again, code = failures.handle(DIED, 2), failures.end(ChildFailedError("ddp_train", DIED))
    if status is Status.FAILED:  # it did not end in good order
        assert starts_again is not is_one_attempt and failure.load_report(run_folder.failure) is not None
        return
    assert not starts_again and failure.load_report(run_folder.failure) is None
    assert "rank 1 on" in (said := capfd.readouterr().err) and "died after the run had ended: the process was ended by SIGSEGV" in said
    result = run_folder.read_result()
    assert result is not None and (result.status, result.step) == (status, 8) and not run_folder.starts.exists()
    assert exit_code_after_agent(run_folder, code, before=before) == (0 if status is Status.COMPLETED else 75)


@pytest.mark.parametrize(("exit_code", "starts_again"), [(1, True), (2, False), (78, False), (93, False)])
def test_what_a_person_has_to_mend_is_not_started_again(tmp_path: Path, exit_code: int, starts_again: bool) -> None:
    failed = {0: ProcessFailure(local_rank=0, pid=7, exitcode=exit_code, error_file="")}
    assert FailuresOfRun(RunFolder(tmp_path), in_sweep=True).handle(failed, 2) is starts_again


def test_the_last_attempt_shows_what_its_agent_has_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failures = FailuresOfAttempt(RunFolder(tmp_path), is_last=True)
    assert not failures.handle(DIED, 2)
    assert failures.end(ChildFailedError("ddp_train", DIED)) == 1
    assert "SIGSEGV" in capfd.readouterr().err
