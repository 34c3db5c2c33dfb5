"""Which tars a split names, and what is read of one."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ddp_train.data.tar_shards import TarShards
from ddp_train.errors import DataError
from tests.unit.data.tars.samples import labels, numbered, png
from tests.unit.data_files import write_shard


def test_the_samples_keep_the_order_of_the_tars_whatever_else_is_in_them(tmp_path: Path) -> None:
    files = [
        ("__meta__/x.json", b"{}"),
        ("./b/x.PNG", png(3)),
        ("./b/x.seg.png", b"another image, under another extension"),
        ("a.1.dir/y.cls", b"1"),  # the key ends at the first dot of the base name, not of the path
        (".hidden.png", b""),
        ("README", b"no extension, no sample"),
        ("./b/x.cls", b" 3 \n"),
        ("a.1.dir/y.png", png(1)),
    ]
    path = write_shard(tmp_path / "0.tar", files)
    with tarfile.open(path, "a") as tar:
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    write_shard(tmp_path / "1.tar", [])
    write_shard(tmp_path / "2.tar", numbered(2))
    assert labels(TarShards(str(tmp_path), "")) == [3, 1, 2]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_may_be_long(tmp_path: Path, format: int) -> None:
    long = "folder/" * 30 + "ü" * 60
    path = tmp_path / "train-0.tar"
    write_shard(
        path, [(f"{long}.png", png(5)), (f"{long}.cls", b"5"), (f"{long}2.png", png(6)[:-30]), (f"{long}2.cls", b"6")], format=format
    )
    data = TarShards(str(tmp_path))
    assert data.batch(np.zeros(1, np.int64))[1].tolist() == [5]
    with pytest.raises(DataError, match=f"image 1, {path}: {long}2.png, cannot be decoded"):
        data.batch(np.arange(2))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("7.png", png())], r"sample 7 has no \.cls, only \.png"),
        ([("7.cls", b"1"), ("7.json", b"{}")], r"sample 7 has no \.jpg or .* or \.webp, only \.cls, \.json"),
        ([*numbered(7), ("007.cls", b"1")], r"007\.cls is the second label of its sample"),
        ([*numbered(7), ("007.jpg", b"")], r"007\.jpg is the second image of its sample"),
        ([("7.png", png()), ("7.cls", b"cat")], r"7\.cls holds 'cat'"),
        ([("7.png", png()), ("7.cls", b"-1")], r"7\.cls holds '-1'"),
        ([("7.png", png()), ("7.cls", b"9" * 40)], r"7\.cls holds '999"),
    ],
)
def test_an_incomplete_sample_is_named_with_its_tar(tmp_path: Path, files: list[tuple[str, bytes]], message: str) -> None:
    write_shard(tmp_path / "train-0.tar", numbered(0))
    path = write_shard(tmp_path / "train-1.tar", [*numbered(1), *files])
    with pytest.raises(DataError, match=f"{path}: {message}"):
        TarShards(str(tmp_path))
    assert not list(tmp_path.glob("tar_index*"))


def test_every_truncated_tar_is_named(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "train-0.tar", numbered(1, 2))
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        end = tar.getmembers()[-1].offset_data + 512
    borders = [offset + change for offset in range(0, end + 1, 512) for change in (-1, 0, 1)]
    for size in [size for size in borders if 0 <= size <= end]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"{path} cannot be read to its end"):
            TarShards(str(tmp_path))
    path.write_bytes(whole[:1024] + b"x" + whole[1025:])  # a damaged header
    with pytest.raises(DataError, match=r"neither a header nor the archive's end at byte 1024"):
        TarShards(str(tmp_path))


def test_compressed_tars_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "train-0.tar", numbered(1))
    (tmp_path / "train-1.tar").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"train-1\.tar is compressed\n.*plain tars.*\n.*gunzip"):
        TarShards(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "nested", "", "train-*.tar", "train-[0-1]*", "nested/[ab].tar"])
def test_a_split_is_a_folder_a_prefix_or_a_pattern(tmp_path: Path, split: str) -> None:
    for value, name in enumerate(["train-0", "train-1", "nested/a", "nested/b"]):
        write_shard(tmp_path / f"{name}.tar", numbered(value))
    expected = [2, 3] if split.startswith("nested") else [0, 1]
    assert labels(TarShards(str(tmp_path), split)) == expected


def test_missing_shards_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder") as caught:
        TarShards(str(tmp_path / "nowhere"))
    assert caught.value.key == "data.root"
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"there is no .*/train/\*\.tar or .*/train-\*\.tar\n.*has notes\.txt\n.*data\.split="):
        TarShards(str(tmp_path))
    write_shard(tmp_path / "train-0.tar", [])
    with pytest.raises(DataError, match=r"train-\*\.tar in .* are empty"):
        TarShards(str(tmp_path))
    write_shard(tmp_path / "train" / "0.tar", numbered(1))
    with pytest.raises(DataError, match=r"data\.split='train/\*\.tar' or data\.split='train-\*\.tar'"):
        TarShards(str(tmp_path))
