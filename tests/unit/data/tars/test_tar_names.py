"""Which tars a split names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.data.tar_shards import TarShards
from ddp_train.errors import DataError
from tests.unit.data.tars.samples import labels, numbered
from tests.unit.data_files import write_shard


@pytest.mark.parametrize("split", ["train", "nested", "", "train-*.tar", "train-{0..1}.tar", "nested/[ab].tar", "{train-0,nested/a}.tar"])
def test_a_split_is_a_folder_a_prefix_or_a_pattern(tmp_path: Path, split: str) -> None:
    for value, name in enumerate(["train-0", "train-1", "nested/a", "nested/b"]):
        write_shard(tmp_path / f"{name}.tar", numbered(value))
    expected = [0, 2] if split.startswith("{") else [2, 3] if split.startswith("nested") else [0, 1]
    assert labels(TarShards(str(tmp_path), split)) == expected


def test_missing_shards_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is no folder") as caught:
        TarShards(str(tmp_path / "nowhere"))
    assert caught.value.key == "data.root"
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"there is no .*/train/\*\.tar or .*/train-\*\.tar\n.*has notes\.txt\n.*data\.split="):
        TarShards(str(tmp_path))
    write_shard(tmp_path / "train-0.tar", [])
    with pytest.raises(DataError, match=r"train-\*\.tar in .* are empty"):
        TarShards(str(tmp_path))
    with pytest.raises(DataError, match=r"has no shard train-1\.tar\n.*all of train-\{0\.\.3\}\.tar"):
        TarShards(str(tmp_path), "train-{0..3}.tar")
    write_shard(tmp_path / "train" / "0.tar", numbered(1))
    with pytest.raises(DataError, match=r"data\.split='train/\*\.tar' or data\.split='train-\*\.tar'"):
        TarShards(str(tmp_path))
