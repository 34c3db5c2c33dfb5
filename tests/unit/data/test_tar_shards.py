"""Tars as WebDataset has them: the same samples as its own reader and as image_folder give, in any order, after one indexing."""

from __future__ import annotations

import builtins
import gc
import gzip
import io
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.data.image_folder import ImageFolder
from ddp_train.data.tar_shards import TarShards
from ddp_train.data.tars import tar_index
from ddp_train.errors import ConfigError, DataError
from tests.unit.data_files import write_image_tree, write_shard, write_shards_of

Image = pytest.importorskip("PIL.Image")


def png(value: int = 0, size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def numbered(*values: int) -> list[tuple[str, bytes]]:
    """The files of samples whose pixels and labels are these numbers."""
    return [file for value in values for file in ((f"{value:03d}.png", png(value)), (f"{value:03d}.cls", str(value).encode()))]


def labels(data: TarShards) -> list[int]:
    """Return all labels in order, read in another order, having checked that they are the pixels."""
    order = np.random.default_rng(0).permutation(len(data))
    images, found = data.batch(order)
    np.testing.assert_allclose(((images[:, 0, 0, 0] * 0.5 + 0.5) * 255).numpy(), found.numpy(), atol=1e-4)
    return found[np.argsort(order)].tolist()


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


@pytest.mark.parametrize("arguments", [{}, {"image_size": 7}, {"channels": 1}, {"in_memory": True}])
def test_the_same_files_give_the_same_tensors_as_in_folders(tmp_path: Path, arguments: dict[str, Any]) -> None:
    write_image_tree(tmp_path, classes=("cat", "cow", "dog"), per_class=5, suffix=".jpg")
    assert len(write_shards_of(tmp_path, tmp_path / "shards", split="train", per_shard=4)) == 4
    folder, shards = ImageFolder(str(tmp_path), **arguments), TarShards(str(tmp_path / "shards"), **arguments)
    assert shards.facts == {name: value for name, value in folder.facts.items() if name != "classes"}
    indices = np.random.default_rng(0).integers(0, 15, 40)
    for mine, theirs in zip(shards.batch(indices), folder.batch(indices), strict=True):
        assert torch.equal(mine, theirs)
    keys = np.arange(40, dtype=np.uint64)
    shards, folder = TarShards(str(tmp_path / "shards"), crop_padding=2, flip=True), ImageFolder(str(tmp_path), crop_padding=2, flip=True)
    assert torch.equal(shards.augment(shards.batch(indices), keys)[0], folder.augment(folder.batch(indices), keys)[0])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its last tar open
def test_what_webdataset_writes_is_read_as_it_reads_it(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    with webdataset.ShardWriter(str(tmp_path / "train-%06d.tar"), maxcount=4, verbose=0) as writer:
        for value in range(10):
            pixels = np.full((4, 4, 3), value, np.uint8)
            writer.write({"__key__": f"{value:06d}", "png": pixels, "cls": value, "json": {"value": value}})
    theirs = webdataset.WebDataset(str(tmp_path / "train-{000000..000002}.tar"), shardshuffle=False).decode("rgb8").to_tuple("png", "cls")
    data = TarShards(str(tmp_path), "train-{000000..000002}.tar", mean=[0.0] * 3, std=[1 / 255] * 3)
    images, found = data.batch(np.arange(10))
    for number, (pixels, label) in enumerate(theirs):
        np.testing.assert_allclose(images[number].numpy(), pixels.transpose(2, 0, 1), atol=1e-5)
        assert found[number] == label
    del theirs
    gc.collect()


@pytest.mark.parametrize("split", ["train", "nested", "", "train-*.tar", "train-{0..1}.tar", "nested/[ab].tar", "{train-0,nested/a}.tar"])
def test_a_split_is_a_folder_a_prefix_or_a_pattern(tmp_path: Path, split: str) -> None:
    for value, name in enumerate(["train-0", "train-1", "nested/a", "nested/b"]):
        write_shard(tmp_path / f"{name}.tar", numbered(value))
    expected = [0, 2] if split.startswith("{") else [2, 3] if split.startswith("nested") else [0, 1]
    assert labels(TarShards(str(tmp_path), split)) == expected


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


def test_the_tars_are_indexed_once_and_only_those_that_changed_again(tmp_path: Path, scanned: list[str]) -> None:
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
    assert scanned[3:] == ["train-1.tar", "train-10.tar"]
    assert TarShards(str(tmp_path)).where(2) == f"{tmp_path}/train-1.tar: 021.png"
    [index] = tmp_path.glob("tar_index-*.npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([index.name, *(f"train-{shard}.tar" for shard in (0, 1, 10, 2))])
    for content in (b"", index.read_bytes()[:-20], index.read_bytes()[:200]):  # damaged
        index.write_bytes(content)
        assert len(TarShards(str(tmp_path))) == 8
    assert len(scanned) == 5 + 3 * 4


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
    with pytest.raises(DataError, match=rf"no place: {data}/tar_index.*Permission denied; {cache}/ddp_train/.*\n.*\n.*XDG_CACHE_HOME"):
        TarShards(str(data))
    folders.pop()
    with caplog.at_level("INFO", logger="ddp_train"):
        assert labels(TarShards(str(data))) == [0, 1]
    assert re.search(rf"{data}/tar_index.* cannot be written: Permission denied", caplog.text)
    assert "indexed 2 samples in 1 tars" in caplog.text and str(cache) in caplog.text
    assert labels(TarShards(str(data))) == [0, 1]
    assert len(scanned) == 2
    assert [path.name for path in data.iterdir()] == ["train-0.tar"]


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


def test_compressed_and_sparse_tars_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "train-0.tar", numbered(1))
    (tmp_path / "train-1.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    for split in ("train", "train-{0,1}.tar*", "train-1.tar.gz", "train-*.tar.gz"):
        with pytest.raises(DataError, match=r"train-1\.tar\.gz is compressed"):
            TarShards(str(tmp_path), split)
    (tmp_path / "train-1.tar.gz").rename(tmp_path / "train-1.tar")
    with pytest.raises(DataError, match=r"train-1\.tar is compressed\n.*plain tars.*\n.*gunzip"):
        TarShards(str(tmp_path))
    with tarfile.open(tmp_path / "train-1.tar", "w") as tar:
        sparse = tarfile.TarInfo("5.png")
        sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": "100"}
        tar.addfile(sparse)
    with pytest.raises(DataError, match=r"train-1\.tar: 5\.png is sparse"):
        TarShards(str(tmp_path))


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


def test_the_number_of_classes_can_be_given_for_a_split_that_lacks_the_last(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", numbered(0, 3))
    assert TarShards(str(tmp_path)).facts["num_classes"] == 4
    assert TarShards(str(tmp_path), num_classes=10).facts["num_classes"] == 10
    with pytest.raises(ConfigError, match=r"data\.num_classes: 3 classes, but .*train-0\.tar has the label 3"):
        TarShards(str(tmp_path), num_classes=3)


@pytest.mark.parametrize("changes", [{"channels": 2}, {"image_size": 0}, {"image_extensions": "jpg"}, {"image_extensions": []}])
def test_a_senseless_argument_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"data.{next(iter(changes))}"):
        TarShards(str(tmp_path), **changes)


def test_it_travels_to_workers_as_the_path_of_the_index(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", numbered(*range(200)))
    data = TarShards(str(tmp_path))
    labels(data)  # a tar is open
    packed = pickle.dumps(data)
    assert len(packed) < 3000
    assert labels(pickle.loads(packed)) == list(range(200))
    write_shard(tmp_path / "train-1.tar", numbered(3))
    TarShards(str(tmp_path))
    with pytest.raises(DataError, match="tars have changed since the run began"):
        pickle.loads(packed)


def test_a_tar_that_changes_during_the_run_is_an_error_not_another_image(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "train-0.tar", numbered(1, 2))
    data = pickle.loads(pickle.dumps(TarShards(str(tmp_path))))
    write_shard(path, numbered(2, 1))
    with pytest.raises(DataError, match=f"{path} has changed since it was indexed"):
        data.batch(np.arange(2))
    path.unlink()
    with pytest.raises(DataError, match=f"image 0, {path}, cannot be decoded: FileNotFoundError"):
        data.batch(np.arange(2))


def test_few_tars_are_open_at_a_time_and_none_is_left_open(tmp_path: Path) -> None:
    for shard in range(80):
        write_shard(tmp_path / f"train-{shard:02d}.tar", numbered(shard))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    data = TarShards(str(tmp_path))
    assert labels(data) == list(range(80))
    assert len(os.listdir("/proc/self/fd")) <= before + 64 + 1  # the mapped index
    del data
    assert len(os.listdir("/proc/self/fd")) == before
