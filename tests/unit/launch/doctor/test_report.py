"""The report of machines that are an engine's reaches the command that asked for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.doctor import report
from ddp_train.launch.doctor.report import Report, exit_code_of, wait_for_report
from ddp_train.launch.engine.engine import Stage, State
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Verdict, settle

FOUND = Report(text="1 problem:", exit_code=78)


class Engine:
    """Says one state after another; one that is an error is raised, one that is a function called."""

    def __init__(self, *states: Any) -> None:
        self._states = iter(states)
        self.stopped: list[tuple[str, bool]] = []

    def state(self, id: str) -> State:
        found = next(self._states)
        if isinstance(found, BaseException):
            raise found
        if callable(found):
            found()
            return self.state(id)
        return State(stage=found)

    def left(self) -> list[Any]:
        return list(self._states)

    def stop(self, id: str, *, at_once: bool = False) -> None:
        self.stopped.append((id, at_once))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_POLL_S", 0.0)
    monkeypatch.setattr(report, "_ENDS_WITHIN_S", 5.0)
    monkeypatch.setattr(report, "_SEEN_WITHIN_S", 0.0)


def wait(folder: Path, *states: Any) -> tuple[int, Engine]:
    engine: Any = Engine(*states)
    return wait_for_report(RunFolder(folder), engine, "7"), engine


def test_the_report_is_shown_when_the_job_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FOUND.write(RunFolder(tmp_path))
    assert wait(tmp_path, Stage.QUEUED, Stage.RUNNING, Stage.RUNNING, Stage.ENDED)[0] == 78
    printed = capsys.readouterr()
    assert printed.out == "1 problem:\n"
    assert printed.err.splitlines() == ["job 7: queued", "job 7: running"]


def test_nothing_starts_an_examination_again(tmp_path: Path) -> None:
    FOUND.write(RunFolder(tmp_path))
    assert settle(RunFolder(tmp_path)).verdict is Verdict.DONE


def test_without_a_report_what_the_job_has_said_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/slurm-7.out").write_text("node1: python is not here\n")
    assert wait(tmp_path, Stage.ENDED)[0] == 78
    assert "node1: python is not here" in capsys.readouterr().err
    assert exit_code_of(RunFolder(tmp_path), 2) == 2
    assert exit_code_of(RunFolder(tmp_path), 0) == 78


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_takes_it_back(tmp_path: Path, number: int, expected: int) -> None:
    before = signal.getsignal(number)
    code, engine = wait(tmp_path, Stage.RUNNING, lambda: os.kill(os.getpid(), number), Stage.RUNNING, Stage.ENDED)
    assert (code, engine.stopped, engine.left()) == (expected, [("7", True)], [])  # it has waited until the job had ended
    assert signal.getsignal(number) == before


def test_an_engine_that_is_silent_for_a_moment_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FOUND.write(RunFolder(tmp_path))
    away = EnvironmentRefuses(happened="SLURM does not answer")
    code, engine = wait(tmp_path, Stage.QUEUED, away, away, Stage.RUNNING, Stage.ENDED)
    assert (code, engine.stopped) == (78, [])
    assert capsys.readouterr().err.count("does not answer") == 1


def test_whatever_ends_the_wait_stops_the_job_before_the_folder_is_cleared(tmp_path: Path) -> None:
    engine: Any = Engine(Stage.RUNNING, OSError("a disk"), EnvironmentRefuses(happened="away"), Stage.ENDED)
    with pytest.raises(OSError, match="a disk"):
        wait_for_report(RunFolder(tmp_path), engine, "7")
    assert (engine.stopped, engine.left()) == ([("7", True)], [])


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    FOUND.write(RunFolder(tmp_path / "file"))
