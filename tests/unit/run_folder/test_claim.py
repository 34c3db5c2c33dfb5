"""A run folder is one run's alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.run_folder.claim import claim_new, claim_typed, clear, give_up_claims


@pytest.fixture(autouse=True)
def holds_nothing_afterwards() -> object:
    yield
    give_up_claims()


def test_many_claims_of_one_name_get_as_many_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_new(tmp_path / "a" / "run"), range(16)))
    assert len(set(claimed)) == 16
    assert {path.name for path in claimed} == {"run", *(f"run_{number}" for number in range(1, 16))}


def test_an_unusable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        claim_new(tmp_path / "file" / "run")


def test_a_folder_that_was_cleared_is_gone_if_it_was_made_and_stays_if_it_was_there(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    folders = [claim_new(tmp_path / "ours"), claim_typed(tmp_path / "theirs", key="hydra.run.dir")]
    for folder in folders:
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "config.yaml").touch()
        (folder / "machine_0").touch()
        clear(folder)
    give_up_claims()
    assert list(tmp_path.rglob("*")) == [tmp_path / "theirs"]
