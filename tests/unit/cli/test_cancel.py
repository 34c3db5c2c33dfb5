"""A run is told to save and end, whoever has it, and nobody starts it again."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.cli import cancel as cancel_module
from ddp_train.cli.cancel import cancel
from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.run_folder import verdict
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.system.folder_lock import HOLDER
from tests.fake_runner import FakeRunner
from tests.unit.cli.runs import a_run, works_in

RUNNER = FakeRunner(lambda job: 99)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_module, "_POLL_S", 0.01)
    monkeypatch.setattr(cancel_module, "_SIGNAL_EVERY_S", 0.02)


def test_a_process_of_this_machine_saves_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    with works_in(run_folder) as process:
        assert cancel([str(tmp_path)], RUNNER) == 0
        assert process.wait() == 75
    assert verdict_of(run_folder).outcome is Outcome.NEVER
    assert "ddp-train resume" in capsys.readouterr().out


def test_a_job_is_marked_first_and_signalled_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = a_run(tmp_path)
    Submission(engine="slurm", id="17").write(run_folder)
    signals: list[str] = []

    def signal(id: str, name: str) -> None:
        assert run_folder.cancelled.exists()
        signals.append(f"{name} to {id}")

    running = State(stage=Stage.RUNNING)
    monkeypatch.setattr(slurm_client, "signal", signal)
    monkeypatch.setattr(slurm_client, "state", lambda id: running if len(signals) < 3 else replace(running, stage=Stage.ENDED))
    assert cancel([str(tmp_path)], RUNNER) == 0
    assert signals == ["USR1 to 17"] * 3  # the first may have come between two steps of the job


def test_on_a_full_disk_the_marker_is_empty_or_nothing_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run_folder = a_run(tmp_path)
    Submission(engine="slurm", id="17").write(run_folder)
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.ENDED if asked else Stage.RUNNING))
    asked: list[str] = []
    monkeypatch.setattr(slurm_client, "signal", lambda id, name: asked.append(name))
    monkeypatch.setattr(slurm_client, "cancel", lambda id: asked.append("scancel"))
    monkeypatch.setattr(verdict, "write_json", full)
    assert cancel([str(tmp_path)], RUNNER) == 0
    assert asked == ["USR1"] and verdict_of(run_folder).outcome is Outcome.NEVER  # an empty file marks as well
    run_folder.cancelled.unlink()
    asked.clear()
    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(OSError, match="No space left"):
        cancel([str(tmp_path)], RUNNER)
    assert not asked


def test_who_does_not_end_is_told_of_a_harder_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = a_run(tmp_path, "cluster.grace_s=1")
    Submission(engine="slurm", id="17").write(run_folder)
    done: list[str] = []
    monkeypatch.setattr(cancel_module, "_PATIENCE_S", -0.9)
    monkeypatch.setattr(slurm_client, "signal", lambda id, name: None)
    monkeypatch.setattr(slurm_client, "cancel", lambda id: done.append(id))
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.ENDED if done else Stage.RUNNING))
    assert cancel([str(tmp_path)], RUNNER) == 1
    assert "--at-once" in capsys.readouterr().err
    assert cancel([str(tmp_path), "--at-once"], RUNNER) == 0 and done == ["17"]


def test_a_run_that_has_ended_is_marked_and_one_that_is_done_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    Result(status=Status.PREEMPTED, step=7).write(run_folder.result)
    assert cancel([str(tmp_path)], RUNNER) == 0 and verdict_of(run_folder).exit_code == 130
    run_folder.cancelled.unlink()
    Result(status=Status.COMPLETED).write(run_folder.result)
    assert cancel([str(tmp_path)], RUNNER) == 0 and not run_folder.cancelled.exists()
    assert "nothing to cancel" in capsys.readouterr().out


def test_a_process_of_another_machine_is_not_ours_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = a_run(tmp_path)
    holder = {"host": "far", "pid": 7, "command": "ddp-train", "started": "now", "boot": "other"}
    (tmp_path / HOLDER).write_text(json.dumps(holder))
    with pytest.raises(EnvironmentRefuses, match="runs on far"):
        cancel([str(run_folder.root)], RUNNER)
    assert not run_folder.cancelled.exists()


def away(*words: str) -> State:
    raise EnvironmentRefuses(happened="SLURM does not answer")


def test_nothing_is_marked_where_nothing_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = a_run(tmp_path)
    Submission(engine="slurm", id="17").write(run_folder)
    monkeypatch.setattr(slurm_client, "state", away)
    with pytest.raises(EnvironmentRefuses, match="does not answer"):
        cancel([str(tmp_path)], RUNNER)
    assert not run_folder.cancelled.exists()
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.QUEUED))
    monkeypatch.setattr(slurm_client, "cancel", away)
    with pytest.raises(EnvironmentRefuses, match="does not answer"):
        cancel([str(tmp_path)], RUNNER)
    assert not run_folder.cancelled.exists()


def test_an_engine_that_is_silent_for_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = a_run(tmp_path)
    Submission(engine="slurm", id="17").write(run_folder)
    states = iter([State(stage=Stage.RUNNING)] * 2 + [None, None, State(stage=Stage.ENDED)])
    monkeypatch.setattr(slurm_client, "state", lambda id: next(states) or away())
    monkeypatch.setattr(slurm_client, "signal", lambda id, name: None)
    monkeypatch.setattr(cancel_module, "_SIGNAL_EVERY_S", 60.0)
    assert cancel([str(tmp_path)], RUNNER) == 0 and run_folder.cancelled.exists()


def test_a_user_without_a_name_cancels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert cancel([str(a_run(tmp_path).root)], RUNNER) == 0
    assert f"cancelled by {os.getuid()} on " in verdict_of(RunFolder(tmp_path)).reason
