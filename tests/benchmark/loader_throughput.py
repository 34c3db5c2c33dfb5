"""What reading data costs: ours against a plain DataLoader doing the same work, and against the best simple loop.

    python tests/benchmark/loader_throughput.py [--rounds 5] [--workers 0 2] [--data images jpegs tars tokens vectors drawing]

Every way gives the same batches of the same samples in a random order, normalised, as tensors. `direct` is a loop that indexes the array
(or decodes the files) itself, from an order that was made before the clock started. `DataLoader` is a map-style dataset of single
samples with torch's own shuffling and collating. Ways take turns; the table has medians of samples per second and the ratio of times
to `direct` in the same round. The data is made here: 50,000 images of 3 x 32 x 32 in memory, 4,000 JPEGs of 64 x 64 in class folders and
the same bytes in tars, 20 million tokens in files that are read in windows of 1,024.

`vectors` and `drawing` are map-style datasets of single samples for ours, too: rows of 64 numbers in memory with a class; JPEGs that are
cropped and flipped at random by PIL and torch's generator. `direct` reads the samples one by one and stacks them there.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_train.data.image_folder import ImageFolder
from ddp_train.data.images.image_array import ImageArray
from ddp_train.data.tar_shards import TarShards
from ddp_train.data.token_files import TokenFiles
from ddp_train.interfaces import DataSource
from ddp_train.loader.dataset_adapter import as_source
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Shuffled
from ddp_train.loader.worker_pool import start_server

Batches = Callable[[int], Iterator[Any]]
"""Begins to give batches, for a number of workers."""


class Single(Dataset[Any]):
    """One sample at a time, as most datasets are written."""

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self._length, self._read = length, read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._read(index)


class ArraySample:
    """A normalised image of an array."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.images, self.labels = images, labels

    def __call__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[index]).float().div(255).sub(0.5).div(0.5), int(self.labels[index])


class FileSample:
    """A decoded and normalised JPEG file."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __call__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.asarray(Image.open(self.paths[index]).convert("RGB")).transpose(2, 0, 1)
        return torch.from_numpy(pixels.copy()).float().div(255).sub(0.5).div(0.5), index % 10


class TokenSample:
    """A window of a memory-mapped file, as nanoGPT reads it."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = np.memmap(self.path, np.uint16, mode="r")
        window = torch.from_numpy(tokens[index * self.length : (index + 1) * self.length + 1].astype(np.int64))
        return window[:-1], window[1:]


class RowSample:
    """A row of a matrix, and its class."""

    def __init__(self, rows: Tensor, labels: list[int]) -> None:
        self.rows, self.labels = rows, labels

    def __call__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], self.labels[index]


class AugmentedSample:
    """A decoded JPEG file, cropped and flipped as torchvision does it."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __call__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = torch.randint(0, 9, (2,)).tolist()
        image = image.crop((left, top, left + 56, top + 56))
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()).float().div(255).sub(0.5).div(0.5), index % 10


@dataclass(frozen=True)
class Case:
    """One data set, and the ways to read it."""

    name: str
    ways: dict[str, Batches]
    size: int  # samples in a batch
    count: int  # batches in a turn


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--data", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_server()
    print("| data | way | samples/s | time, ratio to direct |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.data:
            measure(CASES[name](Path(folder)), options)


def measure(case: Case, options: argparse.Namespace) -> None:
    """Print the rows of one data set."""
    turns: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for way, begin in case.ways.items():
            for workers in options.workers if way != "direct" else [0]:
                stream = begin(workers)
                for _ in islice(stream, 5):
                    pass
                started = time.perf_counter()
                for _ in islice(stream, case.count):
                    pass
                label = way if way == "direct" else f"{way}, {workers} workers"
                turns.setdefault(label, []).append(time.perf_counter() - started)
                del stream
    for label, seconds in turns.items():
        ratios = [mine / direct for mine, direct in zip(seconds, turns["direct"], strict=True)]
        speed = case.count * case.size / statistics.median(seconds)
        print(f"| {case.name} | {label} | {speed:,.0f} | {statistics.median(ratios):.2f} |", flush=True)


def in_memory(folder: Path) -> Case:
    """Images in an array."""
    generator, size = np.random.default_rng(0), 128
    pixels = generator.integers(0, 256, (50_000, 3, 32, 32), np.uint8)
    labels = generator.integers(0, 10, 50_000)
    source = ImageArray(pixels, labels, num_classes=10, mean=[0.5] * 3, std=[0.5] * 3)
    tensor, classes = torch.from_numpy(pixels), torch.from_numpy(labels)

    def read(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return tensor.index_select(0, chosen).float().mul_(2 / 255).sub_(1), classes.index_select(0, chosen)

    ways = {
        "direct": direct(50_000, size, read),
        "ours": ours(source, size),
        "DataLoader": by_sample(50_000, ArraySample(pixels, labels), size),
    }
    return Case("images in memory", ways, size, 300)


def in_folders(folder: Path) -> Case:
    """JPEG files in folders."""
    size, paths = 64, make_images(folder / "images")
    ways = {
        "direct": direct(len(paths), size, decoder(paths)),
        "ours": ours(ImageFolder(str(folder / "images")), size),
        "DataLoader": by_sample(len(paths), FileSample(paths), size),
    }
    return Case("JPEG files", ways, size, 30)


def in_tars(folder: Path) -> Case:
    """The same JPEG files in tars; `direct` reads them from the folders."""
    size, paths = 64, make_images(folder / "images")
    (folder / "tars/train").mkdir(parents=True)
    for number in range(4):
        with tarfile.open(folder / f"tars/train/{number:05d}.tar", "w") as tar:
            for index, path in list(enumerate(paths))[number::4]:
                for name, content in ((f"{index:06d}.jpg", path.read_bytes()), (f"{index:06d}.cls", str(index % 10).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    ways = {"direct": direct(len(paths), size, decoder(paths)), "ours": ours(TarShards(str(folder / "tars")), size)}
    return Case("tars of JPEGs", ways, size, 30)


def in_token_files(folder: Path) -> Case:
    """Windows of a file of tokens."""
    size, length, tokens = 64, 1024, 20_000_000
    root = folder / "tokens"
    root.mkdir()
    text = np.random.default_rng(0).integers(0, 50_000, tokens, np.uint16)
    text[-1] = 50_000  # ends the document
    text.tofile(root / "train_00000.bin")
    np.save(root / "train_00000.starts.npy", np.zeros(1, np.int64))
    shard = {"file": "train_00000.bin", "tokens": tokens, "documents": 1}
    index = {"format": "ddp_train tokens 1", "dtype": "uint16", "vocab_size": 50_001, "tokenizer": "byte", "end_of_text": 50_000}
    (root / "index.json").write_text(json.dumps({**index, "splits": {"train": [shard], "val": []}}))
    mapped = np.asarray(np.memmap(root / "train_00000.bin", np.uint16, mode="r"))
    windows = sliding_window_view(mapped, length + 1)[::length]

    def read(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        chosen = windows[indices]
        return torch.from_numpy(chosen[:, :-1].astype(np.int64)), torch.from_numpy(chosen[:, 1:].astype(np.int64))

    count = len(windows)
    ways = {
        "direct": direct(count, size, read),
        "ours": ours(TokenFiles(str(root), context_length=length), size),
        "DataLoader": by_sample(count, TokenSample(root / "train_00000.bin", length), size),
    }
    return Case("token files", ways, size, 300)


def in_vectors(folder: Path) -> Case:
    """Rows of numbers in memory, one at a time."""
    generator = np.random.default_rng(0)
    rows = torch.from_numpy(generator.standard_normal((10_000, 64), np.float32))
    return of_single_samples("vectors, one by one", RowSample(rows, generator.integers(0, 10, 10_000).tolist()), 10_000, 300)


def in_drawing(folder: Path) -> Case:
    """JPEG files, cropped and flipped at random one at a time."""
    paths = make_images(folder / "images")
    return of_single_samples("JPEG files, transforms that draw", AugmentedSample(paths), len(paths), 20)


def of_single_samples(name: str, read: Callable[[int], tuple[Tensor, int]], length: int, count: int) -> Case:
    """Single samples, also for ours."""
    size = 64

    def together(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        samples = [read(index) for index in indices.tolist()]
        return torch.stack([row for row, _ in samples]), torch.tensor([label for _, label in samples])

    ways = {
        "direct": direct(length, size, together),
        "ours": ours(as_source(Single(length, read)), size),
        "DataLoader": by_sample(length, read, size),
    }
    return Case(name, ways, size, count)


CASES: dict[str, Callable[[Path], Case]] = {
    "images": in_memory,
    "jpegs": in_folders,
    "tars": in_tars,
    "tokens": in_token_files,
    "vectors": in_vectors,
    "drawing": in_drawing,
}


def decoder(paths: list[Path]) -> Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]:
    """Decode into one array, and normalise the batch at once."""

    def read(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        pixels = np.empty((len(indices), 3, 64, 64), np.uint8)
        for place, index in enumerate(indices):
            with Image.open(paths[index]) as image:
                pixels[place] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        return torch.from_numpy(pixels).float().mul_(2 / 255).sub_(1), torch.from_numpy(indices % 10)

    return read


def make_images(folder: Path) -> list[Path]:
    """Write JPEGs of noise that compresses as photographs do, once."""
    paths = sorted(folder.glob("*/*/*.jpg"))
    generator = np.random.default_rng(0)
    for number in range(0 if paths else 4_000):
        path = folder / f"train/class_{number % 10}/{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)).resize((64, 64), Image.Resampling.BILINEAR).save(path)
    return sorted(folder.glob("*/*/*.jpg"))


def ours(source: DataSource, size: int) -> Batches:
    """Read a source as a run does."""

    def begin(workers: int) -> Iterator[Any]:
        order = SampleOrder(Shuffled(len(source), seed=0), global_batch_size=size, drop_last=True)
        return PositionedTrainLoader(
            source, order, rank=0, world_size=1, grad_accum_steps=1, num_workers=workers, pin_memory=False
        ).micro_batches(0)

    return begin


def by_sample(length: int, read: Callable[[int], Any], size: int) -> Batches:
    """Read single samples with torch's DataLoader, epoch after epoch."""

    def begin(workers: int) -> Iterator[Any]:
        loader = DataLoader(Single(length, read), size, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0)
        while True:
            yield from loader

    return begin


def direct(length: int, size: int, read: Callable[[NDArray[np.int64]], Any]) -> Batches:
    """Index in a random order that is there already."""
    order = np.random.default_rng(0).permutation(length)

    def begin(workers: int) -> Iterator[Any]:
        while True:
            for start in range(0, length - size + 1, size):
                yield read(order[start : start + size])

    return begin


if __name__ == "__main__":
    main()
