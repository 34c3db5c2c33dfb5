"""The run folder: ours alone, and nothing in it lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError, DataError
from ddp_train.run_folder import failure
from ddp_train.run_folder.claim import claim_new, release
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import create_json


@pytest.fixture(autouse=True)
def holds_nothing_afterwards() -> object:
    yield
    release()


def test_many_claims_of_one_name_get_as_many_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_new(tmp_path / "a" / "run"), range(16)))
    assert len(set(claimed)) == 16
    assert {path.name for path in claimed} == {"run", *(f"run_{number}" for number in range(1, 16))}


def test_an_unusable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        claim_new(tmp_path / "file" / "run")


def test_a_config_that_is_replaced_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("a: 1\n", "a: 1\n", "a: 2\n", "a: 3\n"):
        folder.record_config(text)
    assert folder.config.read_text() == "a: 3\n"
    assert [(tmp_path / f"config.{number}.yaml").read_text() for number in (1, 2)] == ["a: 1\n", "a: 2\n"]


def test_the_first_failure_is_kept_and_an_error_for_the_user_has_no_traceback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    error = DataError(key="data.root", happened="files are missing", expected="four files", fix="put them there")
    first, second = (failure.from_exception(error, rank=rank, step=None) for rank in (3, 1))
    assert first.record(folder)
    assert not second.record(folder)
    assert json.loads(folder.failure.read_text())["rank"] == 3
    shown = first.screen(folder)
    assert "rank 3" in shown
    assert "data.root: files are missing\n  expected: four files\n  fix: put them there" in shown
    assert "Traceback" not in shown


def test_of_many_threads_one_creates_a_report_and_it_is_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for trial in range(60):
            path = tmp_path / f"{trial}.json"
            created = list(pool.map(lambda thread, path=path: create_json(path, {"thread": thread}), range(4)))  # type: ignore[misc]
            assert created.count(True) == 1
            assert json.loads(path.read_text()) == {"thread": created.index(True)}
    assert len(list(tmp_path.iterdir())) == 60
