"""A run folder is one run's alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.run_folder.claim import claim_new, release


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
