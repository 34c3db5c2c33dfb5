"""What an engine gives back is written whole, and is found by the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.errors import DataError
from ddp_train.launch.engine.engine import Rendered, Submission
from ddp_train.run_folder.paths import RunFolder


def test_the_files_are_written_with_their_folders(tmp_path: Path) -> None:
    files = {tmp_path / "launch/a.sh": "echo a\n", tmp_path / "b": ""}
    Rendered(files=files, commands=[["sbatch", "a.sh"]], run_folders=[tmp_path]).write()
    assert {path: path.read_text() for path in files} == files


def test_a_run_knows_who_has_it(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    assert Submission.read(run_folder) is None
    submission = Submission(engine="slurm", id="17_3")
    submission.write(run_folder)
    assert Submission.read(run_folder) == submission


@pytest.mark.parametrize(("engine", "id"), [("slurm", "--me"), ("slurm", ""), ("..slurm", "17"), ("ssh", "a b")])
def test_an_id_that_is_no_name_is_refused(tmp_path: Path, engine: str, id: str) -> None:
    Submission(engine=engine, id=id).write(run_folder := RunFolder(tmp_path))
    with pytest.raises(DataError, match="an engine, and its id"):
        Submission.read(run_folder)
