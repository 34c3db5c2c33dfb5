"""Make small data sets in the official formats, for tests."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEXT = "".join(f"Line {number}: the quick brown fox jumps over the lazy dog.\n" for number in range(100))


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path: Path, array: NDArray[np.uint8], *, compress: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx_bytes(array)) if compress else idx_bytes(array))
    return path


def write_mnist(root: Path, *, num_train: int = 40, num_test: int = 20, image_size: int = 28, compress: bool = True) -> Path:
    """Write the four files of MNIST's layout into `root`: random images, label = index mod 10."""
    for prefix, count in {"train": num_train, "t10k": num_test}.items():
        suffix = ".gz" if compress else ""
        images = random_images(count, 1, image_size, seed=count)[:, 0]
        write_idx(root / f"{prefix}-images-idx3-ubyte{suffix}", images, compress=compress)
        write_idx(root / f"{prefix}-labels-idx1-ubyte{suffix}", (np.arange(count) % 10).astype(np.uint8), compress=compress)
    return root


def write_cifar_binary(folder: Path, *, per_file: int = 4) -> Path:
    """Write the six files of CIFAR-10's binary version into `folder`: random images, label = index in the file mod 10."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(_cifar_names()):
        labels = (np.arange(per_file) % 10).astype(np.uint8)
        pixels = random_images(per_file, 3, 32, seed=number).reshape(per_file, -1)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())
    return folder


def write_cifar_python(folder: Path, *, per_file: int = 4) -> Path:
    """Write the same images as `write_cifar_binary`, as pickles."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(_cifar_names()):
        labels = [index % 10 for index in range(per_file)]
        write_pickle(folder / name, {b"data": random_images(per_file, 3, 32, seed=number).reshape(per_file, -1), b"labels": labels})
    return folder


def write_pickle(path: Path, content: Any) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def write_image_tree(
    root: Path,
    *,
    splits: Sequence[str] = ("train", "test"),
    classes: Sequence[str] = ("cat", "dog"),
    per_class: int = 3,
    size: tuple[int, int] = (12, 8),
    suffix: str = ".png",
) -> Path:
    """Write root/split/class/0.png and so on: random pixels, (height, width) = `size`."""
    from PIL import Image

    for split in splits:
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(per_class):
                pixels = np.random.default_rng([number, index, len(split)]).integers(0, 256, (*size, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}{suffix}")
    return root


def write_text(path: Path, text: str = TEXT) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_tokens(
    root: Path, splits: Mapping[str, Sequence[Sequence[Sequence[int]]]], *, vocab_size: int = 257, dtype: str = "uint16"
) -> Path:
    """Write a folder of token shards: splits -> shards -> documents -> tokens; `vocab_size` - 1 follows every document."""
    root.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "format": "ddp_train tokens 1",
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer": "byte",
        "end_of_text": vocab_size - 1,
        "splits": {},
    }
    for split, shards in splits.items():
        index["splits"][split] = []
        for number, documents in enumerate(shards):
            name, ended = f"{split}_{number:05d}", [[*document, vocab_size - 1] for document in documents]
            tokens = [token for document in ended for token in document]
            np.asarray(tokens, np.dtype(dtype).newbyteorder("<")).tofile(root / f"{name}.bin")
            np.save(root / f"{name}.starts.npy", np.cumsum([0, *map(len, ended)])[:-1].astype(np.int64))
            index["splits"][split].append({"file": f"{name}.bin", "tokens": len(tokens), "documents": len(documents)})
    (root / "index.json").write_text(json.dumps(index))
    return root


def random_images(count: int, channels: int, size: int, *, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, channels, size, size), np.uint8)


def write_tar(path: Path, folder: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return path


def write_shard(path: Path, files: Sequence[tuple[str, bytes]], *, format: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar with these files, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards_of(folder: Path, shards: Path, *, split: str, per_shard: int) -> list[Path]:
    """Write the files of an image folder's split as shards/split-00000.tar ..., in the order in which ImageFolder has them."""
    classes = sorted((folder / split).iterdir())
    images = [(path, label) for label, name in enumerate(classes) for path in sorted(name.iterdir())]
    written = []
    for start in range(0, len(images), per_shard):
        files = []
        for number, (path, label) in enumerate(images[start : start + per_shard], start):
            files += [(f"{number:06d}{path.suffix}", path.read_bytes()), (f"{number:06d}.cls", f"{label}\n".encode())]
        written.append(write_shard(shards / f"{split}-{start // per_shard:05d}.tar", files))
    return written


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP on this machine; yields the address, which ends in a slash."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def _cifar_names() -> list[str]:
    return [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
