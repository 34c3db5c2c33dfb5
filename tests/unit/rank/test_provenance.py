"""environment.json is written once, and keeps the id of the run; its code is kept while it trains."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from ddp_train.checkpoint.read import damage_of
from ddp_train.distributed.world import alone
from ddp_train.launch.captured_code import capture_code
from ddp_train.rank import provenance
from ddp_train.rank.provenance import record_environment
from ddp_train.run_folder.paths import RunFolder
from tests.unit.checkpoint.states import saved
from tests.unit.launch.repository import commit, project

__all__ = ["project"]


def test_it_is_written_once(tmp_path: Path) -> None:
    job = mock.Mock(run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=[])
    job.config.hash.return_value, job.config.batch = "abc", "16"
    job.run_folder.config.touch()
    record_environment(job, alone())
    first = json.loads(job.run_folder.environment.read_text())
    assert first["config_sha256"] == "abc" and first["world_size"] == 1
    job.command = ["another"]
    record_environment(job, alone())
    assert json.loads(job.run_folder.environment.read_text()) == first


def test_the_code_is_kept_during_the_run_which_waits_for_it_at_its_end_also_after_an_error(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder, goes_on = RunFolder(tmp_path / "run"), threading.Event()
    monkeypatch.setattr(provenance, "capture_code", lambda run_folder: goes_on.wait(10) and capture_code(run_folder))
    with suppress(ValueError), provenance.code_captured(run_folder, alone()):
        assert not run_folder.code_list.exists()
        goes_on.set()
        raise ValueError("no model")
    assert run_folder.code_list.exists()
    monkeypatch.setattr(provenance, "capture_code", lambda run_folder: pytest.fail("a resumed run keeps the first one"))
    with provenance.code_captured(run_folder, alone()):
        pass


def test_code_that_cannot_be_kept_is_said_and_ends_no_run(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(project, a="1\n")
    (project / ".git" / "index").write_bytes(b"corrupt")
    (tmp_path / "file").touch()
    for folder, why in (("run", "`git diff"), ("file", "[Errno")):
        with provenance.code_captured(RunFolder(tmp_path / folder), alone()):
            pass
        assert f"not all code of the run was kept: {why}" in capsys.readouterr().out


def test_a_run_has_a_number_of_its_own_and_keeps_it_when_the_file_is_lost(tmp_path: Path) -> None:
    numbers = []
    for name in ("one", "other"):
        job = mock.Mock(run_folder=RunFolder(tmp_path / name), command=["ddp-train"], overrides=[])
        job.config.hash.return_value, job.config.batch = "abc", "16"
        job.run_folder.checkpoints.mkdir(parents=True)
        job.run_folder.config.touch()
        record_environment(job, alone())
        numbers.append(job.run_folder.run_id())
    assert numbers[0] and numbers[1] and numbers[0] != numbers[1]
    checkpoint = saved(job.run_folder.checkpoints, 3, run=numbers[1])
    job.run_folder.environment.unlink()
    assert damage_of(checkpoint) is None  # nothing says whose it is not
    record_environment(job, alone())
    assert job.run_folder.run_id() == numbers[1] and damage_of(checkpoint) is None
