"""The verdict as a batch script gets it."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from ddp_train.cli.status import show_verdict
from ddp_train.errors import ConfigError
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.run_folder import failure
from ddp_train.run_folder import starts as counting
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.fake_runner import FakeRunner
from tests.unit.launch.engine.specs import spec

RUNNER = FakeRunner(lambda job: 99)


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "config.yaml").touch()
    return RunFolder(tmp_path)


def test_it_prints_one_line_and_says_the_same_with_its_code(run_folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_verdict([str(run_folder.root)], RUNNER) == 75
    Result(status=Status.COMPLETED).write(run_folder.result)
    assert show_verdict([str(run_folder.root)], RUNNER) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("again: ") and second == "done"
    assert show_verdict([str(run_folder.root), "--json"], RUNNER) == 0
    assert json.loads(capsys.readouterr().out) == {"outcome": "done", "reason": "", "exit_code": 0}


def starts(run_folder: RunFolder) -> int:
    return len(json.loads(run_folder.starts.read_text())["began"])


def test_a_start_is_counted_where_one_begins(run_folder: RunFolder) -> None:
    show_verdict([str(run_folder.root)], RUNNER)
    assert not run_folder.starts.exists()
    for _ in range(2):
        show_verdict([str(run_folder.root), "--begins"], RUNNER)
    assert starts(run_folder) == 2
    Result(status=Status.COMPLETED).write(run_folder.result)
    show_verdict(["--begins", str(run_folder.root)], RUNNER)
    assert starts(run_folder) == 2


def test_a_run_that_cannot_be_written_is_never_started_again_and_the_disk_is_named(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(counting, "write_json", full)
    monkeypatch.setattr(failure, "create_json", full)
    assert show_verdict([str(run_folder.root), "--begins"], RUNNER) == 78
    assert show_verdict([str(run_folder.root), "--ended=78"], RUNNER) == 78
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("never"))
    assert first.endswith("cannot be written: No space left on device") and "its machines ended with exit code 78" in second


def test_a_run_that_leaves_no_word_is_started_so_often_and_no_oftener(run_folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(counting.MAX_STARTS_WITHOUT_CHECKPOINT):
        assert show_verdict([str(run_folder.root), "--begins"], RUNNER) == 75
    assert show_verdict([str(run_folder.root), "--begins"], RUNNER) == 93
    said = capsys.readouterr()
    assert "never: NoProgress: everything ended without a report" in said.out and "was started again 3 times" in said.err
    run_folder.archive_failure()  # as `ddp-train resume` does
    assert show_verdict([str(run_folder.root), "--begins"], RUNNER) == 75


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        *((words, "no run folder was given") for words in ([], ["--begins"], ["a", "b"])),
        (["a", "--ended=x"], "--ended: 'x' is not a number"),
    ],
)
def test_it_asks_for_the_run(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        show_verdict(arguments, RUNNER)


def test_one_job_at_a_time_has_a_run(run_folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"7": Stage.QUEUED, "8": Stage.RUNNING}
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=stages[id]))
    spec(run_folder.root).write()

    def asks(job: str) -> str:
        show_verdict([str(run_folder.root), "--begins", f"--job={job}"], RUNNER)
        return capsys.readouterr().out.partition(":")[0]

    def noted() -> str | None:
        submission = Submission.read(run_folder)
        return submission and submission.id

    assert (asks("8"), noted()) == ("again", "8")  # who submitted it was killed before it could note it
    assert (asks("8"), noted()) == ("again", "8")
    assert (asks("7"), noted()) == ("never", "8")
    assert starts(run_folder) == 2
    stages["8"] = Stage.ENDED
    assert (asks("7"), noted()) == ("again", "7")  # submitted by hand, when the first one was over
    assert show_verdict([str(run_folder.root), "--begins", "--job=8"], RUNNER) == 0


def test_the_exit_code_of_the_machines_counts_where_they_leave_no_word(run_folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    spec(run_folder.root).write()
    show_verdict([str(run_folder.root), "--begins"], RUNNER)
    assert show_verdict([str(run_folder.root), "--ended=1"], RUNNER) == 75
    assert show_verdict([str(run_folder.root), "--ended=127"], RUNNER) == 78
    assert "never: a machine: MachineRefused: a machine refused (exit code 78)" in capsys.readouterr().out
    assert show_verdict([str(run_folder.root)], RUNNER) == 78  # asked again, later
