"""Tars as WebDataset has them: the same samples as its own reader and as image_folder give, in any order."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.data.image_folder import ImageFolder
from ddp_train.data.tar_shards import TarShards
from ddp_train.errors import ConfigError, DataError
from tests.unit.data.tars.samples import labels, numbered
from tests.unit.data_files import write_image_tree, write_shard, write_shards_of


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
    assert torch.equal(shards.augment(shards.batch(indices), keys, indices)[0], folder.augment(folder.batch(indices), keys, indices)[0])


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


def test_the_number_of_classes_can_be_given_for_a_split_that_lacks_the_last(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", numbered(0, 3))
    assert TarShards(str(tmp_path)).facts["num_classes"] == 4
    assert TarShards(str(tmp_path), num_classes=10).facts["num_classes"] == 10
    with pytest.raises(ConfigError, match=r"data\.num_classes: 3 classes, but there is a label 3"):
        TarShards(str(tmp_path), num_classes=3)


@pytest.mark.parametrize("changes", [{"image_extensions": "jpg"}, {"image_extensions": []}])
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
    assert labels(pickle.loads(packed)) == list(range(200))  # the new tars have another index


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
