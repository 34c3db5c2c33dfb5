"""Where each sample of a set of tars lies: found once, kept in a file, mapped from then on.

The file is two numpy arrays one after the other: SAMPLE [N], which is mapped, and the tars with their sizes and times. A hash of the tars'
names, sizes and times is in its name: tars that change have another index.
"""

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.data.tars.tar_scan import SAMPLE, ShardSet, scan
from ddp_train.errors import DataError
from ddp_train.system.files import appears_whole

_VERSION = 1
_THREADS = 16  # what they wait for is the disk
_log = logging.getLogger(__name__)


class TarIndex:
    """An index that exists. Travels to loader workers as its path; they map it again.

    Args:
        path: of the index.
        folder: of the tars.

    Attributes:
        samples: SAMPLE [N].
        shards: per tar `name`, `size` in bytes, `mtime_ns`, `num_samples` and `max_label` (-1 without samples).

    Raises OSError, ValueError: there is none, or it is damaged.
    """

    def __init__(self, path: str, folder: str) -> None:
        self.path, self._folder = path, folder
        mapped = np.load(path, mmap_mode="r")
        if mapped.dtype != SAMPLE:
            raise ValueError(f"{path} is not an index of tars")
        self.samples: NDArray[np.void] = np.asarray(mapped)  # a plain view: the subclass makes every access slower
        with open(path, "rb") as file:
            file.seek(mapped.offset + mapped.nbytes)
            self.shards: NDArray[np.void] = np.load(file)

    def shard_path(self, shard: int) -> str:
        return os.path.join(self._folder, os.fsdecode(self.shards["name"][shard]))

    def __reduce__(self) -> tuple[Any, ...]:
        return TarIndex, (self.path, self._folder)


def open_index(shards: ShardSet, *, image_extensions: Sequence[str], label_extension: str) -> TarIndex:
    """Return the index of the tars; make it where there is none.

    It is written next to the tars, or below $XDG_CACHE_HOME/ddp_train where that is not allowed.

    Raises DataError: see `scan`; the index can be written nowhere.
    """
    tars = _stat(shards)
    name = hashlib.sha256(repr([_VERSION, tuple(image_extensions), label_extension, tars.tolist()]).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [os.path.join(folder, f"tar_index-{name}.npy") for folder in (shards.folder, os.path.join(cache, "ddp_train"))]
    for path in places:
        with suppress(OSError, ValueError, EOFError):
            return TarIndex(path, shards.folder)
    started = time.monotonic()
    _log.info("indexing %d tars in %s, once", len(tars), shards.folder)
    read = partial(scan, image_extensions=tuple(image_extensions), label_extension=label_extension)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:  # the first error cancels what has not begun
        parts = list(pool.map(read, shards.paths))
    if not np.array_equal(_stat(shards), tars):
        raise DataError(key="data.root", happened=f"tars in {shards.folder} change while they are read", expected="finished tars")
    for number, part in enumerate(parts):
        part["shard"] = number
        tars["num_samples"][number] = len(part)
        tars["max_label"][number] = part["label"].max(initial=-1)
    samples = np.concatenate(parts)
    path = _write(places, samples, tars)
    _log.info("indexed %d samples in %d tars in %.1f s: %s", len(samples), len(tars), time.monotonic() - started, path)
    return TarIndex(path, shards.folder)


def _stat(shards: ShardSet) -> NDArray[np.void]:
    names = [os.fsencode(name) for name in shards.names]
    kind = [("name", f"S{max(map(len, names))}"), *((field, np.int64) for field in ("size", "mtime_ns", "num_samples", "max_label"))]
    try:
        stats = [os.stat(path) for path in shards.paths]
    except OSError as error:
        raise DataError(key="data.root", happened=f"{error.filename} cannot be read: {error.strerror}", expected="a tar") from error
    return np.array([(name, stat.st_size, stat.st_mtime_ns, 0, -1) for name, stat in zip(names, stats, strict=True)], kind)


def _write(places: list[str], samples: NDArray[np.void], shards: NDArray[np.void]) -> str:
    """Write the index to the first place that takes it; it appears complete or not at all."""
    refusals: list[str] = []
    for path in places:
        try:  # not mkstemp: its files are readable by their owner alone
            with appears_whole(Path(path), nonce=uuid.uuid4().hex) as unfinished, open(unfinished, "xb") as file:
                np.save(file, samples)
                np.save(file, shards)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            refusals.append(f"{path} cannot be written: {error.strerror}")
            _log.info("the index is written elsewhere: %s", refusals[-1])
        else:
            return path
    happened = "the index of the tars cannot be written: " + "; ".join(refusals)
    expected = "a folder to write to, next to the tars or in the cache"
    raise DataError(key="data.root", happened=happened, expected=expected, fix="XDG_CACHE_HOME=FOLDER")
