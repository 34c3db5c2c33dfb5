"""result.json: written and read in one place, and the same for every reader."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ddp_train.errors import INTERRUPTED, PREEMPTED
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Result, Status, status_of

COMPLETED = Result(
    status=Status.COMPLETED,
    step=10,
    epoch=0.5,
    samples=320,
    metrics={"last": {"eval/accuracy": 0.9}, "best": {"eval/accuracy": {"value": 0.95, "step": 5}}},
    headline={"metric": "eval/accuracy", "goal": "max"},
    seconds=1.25,
)


@pytest.mark.parametrize("result", [COMPLETED, *(Result(status=status) for status in Status), Result(status=Status.FAILED, error="E: why")])
def test_what_is_written_is_read_back(tmp_path: Path, result: Result) -> None:
    result.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == result


def test_the_keys_stand_in_their_order_and_a_headline_or_an_error_only_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    COMPLETED.write(path)
    content = json.loads(path.read_text())
    assert list(content) == ["status", "step", "epoch", "samples", "metrics", "headline", "seconds"]
    assert content["status"] == "completed"
    Result(status=Status.FAILED, step=7, seconds=0.5, error="ValueError: too large").write(path)
    assert json.loads(path.read_text()) == {
        "status": "failed",
        "step": 7,
        "epoch": None,
        "samples": None,
        "metrics": {},
        "seconds": 0.5,
        "error": "ValueError: too large",
    }


def test_a_run_without_a_result_is_not_completed(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    assert run_folder.read_result() is None
    assert not run_folder.is_completed()
    for status in (Status.FAILED, Status.COMPLETED):
        Result(status=status).write(run_folder.result)
        assert run_folder.is_completed() == (status == Status.COMPLETED)


def test_a_key_of_another_version_is_passed_over_and_a_damaged_file_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"status": "preempted", "step": 4, "weather": "fair"}')
    assert Result.read(path) == Result(status=Status.PREEMPTED, step=4)
    for damaged in ('{"status": "lost"}', "{}", "[]", '{"status": "comp'):  # as if the run had left no word
        path.write_text(damaged)
        assert Result.read(path) is None


def test_ctrl_c_interrupts_and_every_other_stop_preempts() -> None:
    assert EXIT_CODE_OF_STOP[status_of(signal.SIGINT)] == INTERRUPTED
    assert {EXIT_CODE_OF_STOP[status_of(number)] for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)} == {PREEMPTED}
