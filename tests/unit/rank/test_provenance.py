"""environment.json is written beside the first steps, once, and keeps the id of the run."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from ddp_train.checkpoint.verify import problem_of
from ddp_train.distributed.world import alone
from ddp_train.rank import provenance
from ddp_train.run_folder.paths import RunFolder
from tests.unit.checkpoint.states import saved
from tests.unit.launch.test_captured_code import commit


def test_it_is_written_beside_the_block_and_there_when_the_block_is_left_also_by_an_error(tmp_path: Path) -> None:
    job = mock.Mock(run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=[])
    job.config.hash.return_value, job.config.batch = "abc", "16"
    job.run_folder.config.touch()
    with pytest.raises(ValueError, match="no model"), provenance.recorded(job, alone()):
        raise ValueError("no model")
    first = json.loads(job.run_folder.environment.read_text())
    assert first["config_sha256"] == "abc" and first["world_size"] == 1
    job.command = ["another"]
    with provenance.recorded(job, alone()):
        pass
    assert json.loads(job.run_folder.environment.read_text()) == first
    job.run_folder.environment.unlink()
    with (
        mock.patch.object(provenance, "write_json", side_effect=OSError("disk full")),
        pytest.raises(OSError, match="disk full"),
        provenance.recorded(job, alone()),
    ):
        pass


def test_a_change_of_a_file_that_is_not_utf_8_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "project").mkdir()
    monkeypatch.chdir(folder)
    (folder / "a.txt").write_bytes(b"caf\xe9\n")
    commit(folder)
    (folder / "a.txt").write_bytes(b"th\xe9\n")
    job = mock.Mock(run_folder=RunFolder(tmp_path / "run"), command=["ddp-train"], overrides=[])
    job.config.hash.return_value, job.config.batch = "abc", "16"
    job.run_folder.root.mkdir()
    job.run_folder.config.touch()
    with provenance.recorded(job, alone()):
        pass
    assert json.loads(job.run_folder.environment.read_text())["git"]["dirty"] is True
    assert "+th\ufffd" in job.run_folder.code_diff.read_text()


def test_a_run_has_a_number_of_its_own_and_keeps_it_when_the_file_is_lost(tmp_path: Path) -> None:
    numbers = []
    for name in ("one", "other"):
        job = mock.Mock(run_folder=RunFolder(tmp_path / name), command=["ddp-train"], overrides=[])
        job.config.hash.return_value, job.config.batch = "abc", "16"
        job.run_folder.checkpoints.mkdir(parents=True)
        job.run_folder.config.touch()
        with provenance.recorded(job, alone()):
            pass
        numbers.append(job.run_folder.run_id())
    assert numbers[0] and numbers[1] and numbers[0] != numbers[1]
    checkpoint = saved(job.run_folder.checkpoints, 3, run=numbers[1])
    job.run_folder.environment.unlink()
    assert problem_of(checkpoint) == ""  # nothing says whose it is not
    with provenance.recorded(job, alone()):
        pass
    assert job.run_folder.run_id() == numbers[1] and problem_of(checkpoint) == ""
