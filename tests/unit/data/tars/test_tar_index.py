"""The index of tars: made once, again when they have changed, and where there is room for it."""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_train.data.tar_shards import TarShards
from ddp_train.data.tars import tar_index
from ddp_train.errors import DataError
from tests.unit.data.tars.samples import labels, numbered, png
from tests.unit.data_files import write_shard


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tars that are read from here on, to find what is in them."""
    names: list[str] = []
    real_scan: Callable[..., Any] = tar_index.scan

    def scan(path: str, **arguments: Any) -> Any:
        names.append(os.path.basename(path))
        return real_scan(path, **arguments)

    monkeypatch.setattr(tar_index, "scan", scan)
    return names


def test_the_tars_are_indexed_once_and_again_when_they_have_changed(tmp_path: Path, scanned: list[str]) -> None:
    for shard in range(3):
        write_shard(tmp_path / f"train-{shard}.tar", numbered(shard, shard + 10))
    assert labels(TarShards(str(tmp_path))) == [0, 10, 1, 11, 2, 12]
    assert sorted(scanned) == ["train-0.tar", "train-1.tar", "train-2.tar"]
    assert labels(TarShards(str(tmp_path), "train-*.tar")) == [0, 10, 1, 11, 2, 12]  # the same tars, spelled otherwise
    assert len(scanned) == 3
    size = (tmp_path / "train-1.tar").stat().st_size
    assert write_shard(tmp_path / "train-1.tar", numbered(21, 11, 1)).stat().st_size == size
    assert labels(TarShards(str(tmp_path))) == [0, 10, 21, 11, 1, 2, 12]
    write_shard(tmp_path / "train-10.tar", numbered(4))
    assert labels(TarShards(str(tmp_path))) == [0, 10, 21, 11, 1, 4, 2, 12]
    assert len(scanned) == 3 + 3 + 4
    assert TarShards(str(tmp_path)).where(2) == f"{tmp_path}/train-1.tar: 021.png"
    indices = list(tmp_path.glob("tar_index-*.npy"))
    assert len(indices) == 3  # of the tars as they were each time
    index = max(indices, key=lambda path: path.stat().st_size)
    for content in (b"", index.read_bytes()[:-20], index.read_bytes()[:200]):  # damaged
        index.write_bytes(content)
        assert len(TarShards(str(tmp_path))) == 8
    assert len(scanned) == 10 + 3 * 4


def test_other_extensions_have_an_index_of_their_own(tmp_path: Path) -> None:
    files = [("0.left.png", png(1)), ("0.right.png", png(2)), ("0.cls", b"1"), ("0.Other", b"2")]
    write_shard(tmp_path / "train-0.tar", files)
    assert labels(TarShards(str(tmp_path), image_extensions=["left.png"])) == [1]
    assert labels(TarShards(str(tmp_path), image_extensions=[".RIGHT.png"], label_extension="other")) == [2]


def test_a_folder_that_may_not_be_written_has_its_index_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scanned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    write_shard(data / "train-0.tar", numbered(0, 1))
    real_open = builtins.open

    def read_only(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "x" in mode and any(str(path).startswith(f"{folder}/") for folder in folders):
            raise PermissionError(13, "Permission denied")
        return real_open(path, mode, *arguments, **options)

    monkeypatch.setattr(builtins, "open", read_only)  # root may write everywhere
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    folders = [data, cache]
    with pytest.raises(
        DataError, match=rf"cannot be written: {data}/tar_index.*Permission denied; {cache}/ddp_train/.*\n.*\n.*XDG_CACHE_HOME"
    ):
        TarShards(str(data))
    folders.pop()
    with caplog.at_level("INFO", logger="ddp_train"):
        assert labels(TarShards(str(data))) == [0, 1]
    assert re.search(rf"{data}/tar_index.* cannot be written: Permission denied", caplog.text)
    assert "indexed 2 samples in 1 tars" in caplog.text and str(cache) in caplog.text
    assert labels(TarShards(str(data))) == [0, 1]
    assert len(scanned) == 2
    assert [path.name for path in data.iterdir()] == ["train-0.tar"]
