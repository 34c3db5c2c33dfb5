"""A run that comes after others: what it waits for, what it says meanwhile, and how the waiting ends."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_train.errors import ENVIRONMENT_REFUSES, INTERRUPTED, TERMINATED
from ddp_train.job import Job
from ddp_train.launch import after
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.verdict import Verdict, mark_cancelled, settle
from ddp_train.system.files import write_json
from ddp_train.system.folder_lock import hold, release
from tests.conftest import TINY
from tests.unit.parts import checked


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Look often, stand in an empty folder, and let go of every folder."""
    monkeypatch.setattr(after, "_LOOK_EVERY_S", 0.02)
    monkeypatch.chdir(tmp_path)
    yield
    release()


def runs(*names: str) -> list[RunFolder]:
    folders = [RunFolder(Path(name).absolute()) for name in names]
    for folder in folders:
        folder.root.mkdir()
        folder.config.write_text("name: a\n")
    return folders


def job(*names: str) -> Job:
    """Return a job that comes after the runs with these names."""
    folder = RunFolder(Path("later").absolute())
    folder.root.mkdir(exist_ok=True)
    return Job(config=checked(f"after=[{','.join(names)}]"), run_folder=folder, command=[], overrides=[])


def later(seconds: float, *work: object) -> threading.Timer:
    timer = threading.Timer(seconds, work[0], work[1:])  # type: ignore[arg-type]
    timer.start()
    return timer


def end(run: RunFolder, status: Status = Status.COMPLETED) -> None:
    Result(status=status, step=3).write(run.result)


def test_what_is_done_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    end(runs("a")[0])
    assert after.wait_for_runs(job("a")) == 0
    assert capsys.readouterr().err == ""


def test_it_begins_when_the_last_one_is_done_and_says_where_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = runs("a", "b")
    hold(first.root, key="")
    first.logs.mkdir()
    first.steps_taken.write_text(f"{'7':<20}{'7':<20}\n")
    end(second, Status.PREEMPTED)
    waiting = job("a", "b")
    timers = [later(0.2, end, first), later(0.4, end, second)]
    assert after.wait_for_runs(waiting) == 0
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "waiting for a: running, step 7",
        "a is done",
        "waiting for b: not running: stopped in good order; it continues from the start",
        "b is done",
    ]
    for timer in timers:
        timer.join()


def test_it_says_again_how_far_the_other_one_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after, "_SAY_EVERY_S", 0.1)
    (run,), waiting = runs("a"), job("a")
    timer = later(0.5, end, run)
    after.wait_for_runs(waiting)
    timer.join()
    assert capsys.readouterr().err.count("waiting for a: ") >= 3


def test_what_never_gets_done_ends_it_and_whatever_comes_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    (run,), waiting = runs("a"), job("a")
    timer = later(0.2, mark_cancelled, run)
    assert after.wait_for_runs(waiting) == ENVIRONMENT_REFUSES
    timer.join()
    said = capsys.readouterr().err
    assert "after: a does not get done: cancelled by" in said and "ddp-train resume later" in said
    settled = settle(waiting.run_folder)
    assert (settled.verdict, settled.exit_code) == (Verdict.NEVER, ENVIRONMENT_REFUSES)


def test_a_folder_that_is_away_for_a_moment_is_waited_for_and_one_that_stays_away_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,), waiting = runs("a"), job("a")
    away = run.root.rename("away")
    timers = [later(0.1, away.rename, run.root), later(0.3, end, run)]
    assert after.wait_for_runs(waiting) == 0
    for timer in timers:
        timer.join()
    assert "waiting for a: cannot be looked at: No such file or directory\n" in capsys.readouterr().err
    monkeypatch.setattr(after, "_UNSEEN_FOR_S", 0.1)
    shutil.rmtree(run.root)
    assert after.wait_for_runs(waiting) == ENVIRONMENT_REFUSES
    assert "after: a cannot be looked at: No such file or directory, for 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_a_stop_signal_ends_the_waiting(number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    runs("a")
    waiting = job("a")
    timer = later(0.2, os.kill, os.getpid(), number)
    assert after.wait_for_runs(waiting) == code
    timer.join()
    assert "`ddp-train resume later` waits again" in capsys.readouterr().err
    assert waiting.run_folder.read_result() is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_that_has_begun_does_not_wait_again() -> None:
    (run,) = runs("a")
    waiting = job("a")
    write_json(waiting.run_folder.environment, {})
    assert after.before(waiting) == []
    shutil.rmtree(run.root)
    assert after.wait_for_runs(waiting) == 0


def test_what_was_given_to_an_engine_and_does_not_run_yet_is_said() -> None:
    (run,) = runs("a")
    write_json(run.submitted, {"engine": "slurm", "id": "7"})
    assert after.state(run.root, settle(run)) == "submitted, not running"


def test_slurm_waits_by_itself_but_not_for_a_job_that_has_its_machines(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = runs("a")
    folder = RunFolder(Path("later").absolute())
    folder.root.mkdir()
    config = checked("after=a", base=[*TINY, "cluster=slurm", "cluster.device=cpu"])
    waiting = Job(config=config, run_folder=folder, command=[], overrides=[])
    assert after.wait_for_runs(waiting) == 0
    mark_cancelled(run)
    assert after.wait_for_runs(waiting, is_asked=True) == ENVIRONMENT_REFUSES
    assert "a does not get done" in capsys.readouterr().err


def test_machines_of_a_run_by_hand_wait_before_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = runs("a")
    config = checked("after=a")
    timer = later(0.2, os.kill, os.getpid(), signal.SIGINT)
    assert after.wait_before_meeting(config) == INTERRUPTED
    timer.join()
    assert "stopped while it waited; nothing was begun" in capsys.readouterr().err
    timer = later(0.2, end, run)
    assert after.wait_before_meeting(config) == 0
    timer.join()
    mark_cancelled(run)
    run.result.unlink()
    assert after.wait_before_meeting(config) == ENVIRONMENT_REFUSES
