"""Iterable data sets: small ones of our own, and those of other libraries."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset


class Counting(IterableDataset):
    """The numbers 0 to length - 1, and those after them in the next pass."""

    def __init__(self, length: int) -> None:
        self._length, self._epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self._length):
            yield self._epoch * self._length + number


class Stateful(Counting):
    """The same, and it can say where it is."""

    def __init__(self, length: int, extra: Any = None) -> None:
        super().__init__(length)
        self._next, self._extra = 0, extra

    def __iter__(self) -> Iterator[int]:
        while self._next < self._length:
            self._next += 1
            yield self._epoch * self._length + self._next - 1
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "extra": [self._extra]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Sharding(Counting):
    """One that cuts itself."""

    def shard(self, num_shards: int, index: int) -> list[int]:
        return list(range(self._length))[index::num_shards]


def hugging_face(folder: Path, length: int, files: int) -> Any:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    datasets.disable_progress_bars()
    paths = [folder / f"{number}.jsonl" for number in range(files)]
    for number, path in enumerate(paths):
        path.write_text("".join(json.dumps({"number": value, "pair": [value, 0]}) + "\n" for value in range(number, length, files)))
    return datasets.load_dataset(
        "json", data_files=[str(path) for path in paths], split="train", streaming=True, cache_dir=str(folder / "cache")
    )


def number_of(sample: dict[str, Any]) -> tuple[int, str]:
    return int(sample["number"]), sample["__key__"]


def web(folder: Path, length: int, files: int, **arguments: Any) -> Any:
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
    for file in range(files):
        with tarfile.open(folder / f"{file}.tar", "w") as tar:
            for value in range(file, length, files):
                content = str(value).encode()
                entry = tarfile.TarInfo(f"sample{value:03d}.number")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return webdataset.WebDataset(f"{folder}/{{0..{files - 1}}}.tar", shardshuffle=False, **arguments).map(number_of)


def make(kind: str, folder: Path, length: int = 24) -> Any:
    if kind == "counting":
        return Counting(length)
    if kind == "stateful":
        return Stateful(length)
    if kind == "sharding":
        return Sharding(length)
    if kind == "web":
        return web(folder, length, files=8)
    return hugging_face(folder, length, files=8 if kind == "hugging face, many files" else 1)
