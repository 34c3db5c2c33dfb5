"""A sweep's slot on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_train.errors import DONE, FAILED, INTERRUPTED, PREEMPTED
from ddp_train.launch import local
from ddp_train.launch.job import Job
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.process import Child, fork
from tests.unit.parts import checked

Start = Callable[[Callable[[], int]], local.LocalSlot]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a job whose agent does what a function does."""
    slot = local.LocalSlot(0, 1)

    def start(be_agent: Callable[[], int]) -> local.LocalSlot:
        monkeypatch.setattr(local, "start_agent", lambda *given, **others: fork(be_agent))
        slot.start(Job(config=checked(), run_folder=RunFolder(tmp_path), command=[], overrides=[], in_sweep=True))
        return slot

    yield start
    slot.end()


def sleep() -> int:
    time.sleep(60)
    return DONE


def agent_of(slot: local.LocalSlot) -> Child:
    assert slot._running is not None
    return slot._running.agent


def test_the_exit_code_comes_when_the_agent_has_ended(start: Start) -> None:
    assert start(sleep).poll(0.01) is None
    assert [start(lambda code=code: code).poll(10) for code in (DONE, FAILED)] == [DONE, FAILED]  # type: ignore[misc]


def test_a_job_that_was_stopped_by_others_says_so_and_not_its_agent(start: Start, tmp_path: Path) -> None:
    slot = start(lambda: DONE)
    Result(status=Status.PREEMPTED, step=3).write(tmp_path / "result.json")
    assert slot.poll(10) == PREEMPTED


def test_killing_a_job_is_an_interruption(start: Start) -> None:
    slot = start(sleep)
    slot.stop(signal.SIGKILL)
    assert slot.poll(10) == INTERRUPTED


def test_an_agent_that_others_kill_is_the_failure_of_its_job(start: Start, tmp_path: Path) -> None:
    slot = start(sleep)
    os.kill(agent_of(slot).pid, signal.SIGKILL)
    assert slot.poll(10) == 128 + signal.SIGKILL
    report = failure.load_report(tmp_path / "failure.json")
    assert report is not None and "SIGKILL" in report.message


def test_a_full_disk_costs_the_report_of_a_killed_agent_and_not_the_sweep(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failure, "create_json", full)
    slot = start(sleep)
    os.kill(agent_of(slot).pid, signal.SIGKILL)
    assert slot.poll(10) == 128 + signal.SIGKILL
    assert not (tmp_path / "failure.json").exists()
