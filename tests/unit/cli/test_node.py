"""`ddp-train node`: what it writes into a run's folder before the machines meet, and nothing into one that it does not hold."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.cli import node as module
from ddp_train.errors import DONE, WRONG_INPUT, ConfigError
from ddp_train.launch import signals
from ddp_train.launch.job import Job
from ddp_train.launch.source_copy import Code
from ddp_train.launch.spec import Spec
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.files import write_json
from ddp_train.system.folder_lock import lock, unlock_all
from tests.fake_runner import FakeRunner
from tests.unit.parts import checked

FIRST, SECOND = ["--index=0", "--launch=monday"], ["--index=1", "--launch=monday"]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spec]:
    """Give the spec of a run whose machines all make a mistake: the folder where it was typed is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_UNLOCKED_WITHIN_S", 0.2)
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    monkeypatch.setattr(signals, "early_stops", [])
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PET_", "NODE_RANK"))]:
        monkeypatch.delenv(name)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    job = Job(config=checked(), run_folder=folder, command=["ddp-train"], overrides=[])
    yield Spec(job=job, engine="slurm", processes=(2, 2), min_nodes=2, working_directory=str(tmp_path / "gone"))
    unlock_all()


def node(spec: Spec, *words: str) -> int:
    def run(job: Job) -> int:
        raise AssertionError(job)

    return module.node([str(spec.write()), *words], FakeRunner(run))


def report(spec: Spec) -> failure.Failure | None:
    return failure.load_report(spec.job.run_folder.failure)


def test_who_does_not_know_which_machine_it_is_writes_nothing(spec: Spec) -> None:
    with pytest.raises(ConfigError, match="this machine's number is unknown"):
        node(spec)
    assert report(spec) is None and spec.job.run_folder.read_result() is None


def test_a_mistake_of_the_first_machine_is_the_runs(spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(spec.job.run_folder.failure, {"of": "an earlier life"})
    assert node(spec, *FIRST) == WRONG_INPUT
    found, result = report(spec), spec.job.run_folder.read_result()
    assert found is not None and "is not on this machine" in found.message and found.exit_code == WRONG_INPUT
    assert result is not None and result.status == Status.FAILED
    assert "is not on this machine" in capsys.readouterr().err


def test_a_run_that_is_completed_stays_so(spec: Spec) -> None:
    before = Result(status=Status.COMPLETED, step=3)
    before.write(spec.job.run_folder.result)
    assert node(spec, *FIRST) == WRONG_INPUT
    assert report(spec) is None and spec.job.run_folder.read_result() == before


def test_nothing_is_written_into_a_folder_that_another_run_holds(spec: Spec) -> None:
    lock(spec.job.run_folder.root, key="")
    with pytest.raises(ConfigError, match="another run is working"):
        node(spec, *FIRST)
    assert report(spec) is None and spec.job.run_folder.read_result() is None


def test_a_stop_while_the_folder_is_waited_for_is_no_failure(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "early_stops", [signal.SIGUSR1])
    lock(spec.job.run_folder.root, key="")
    assert node(spec, *FIRST) == DONE
    assert report(spec) is None and spec.job.run_folder.read_result() is None


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_mistake_of_another_machine_is_the_runs_once_the_first_has_taken_the_folder(spec: Spec, has_begun: bool) -> None:
    if has_begun:
        write_json(spec.job.run_folder.meeting("monday"), {"hosts": ["node0"], "port": 1})
    assert node(spec, *SECOND) == WRONG_INPUT
    assert (report(spec) is not None) == has_begun


def test_code_that_is_not_as_it_was_is_refused(spec: Spec) -> None:
    assert node(replace(spec, code=Code(folder="/nowhere", hash="0")), *FIRST) == 78
    found = report(spec)
    assert found is not None and found.exit_code == 78
