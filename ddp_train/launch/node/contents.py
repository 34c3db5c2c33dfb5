"""What a path holds, told in a few kilobytes: names, sizes, and hashes of samples, so that two machines can compare theirs.

It cannot see everything: of a large file blocks are read, of many files some, and what is over when the time is over is not looked at.
Two machines compare only what both have looked at.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

_MOST_NAMES = 2000
_MOST_IN_A_FOLDER = 20_000
_MOST_SAMPLED = 64
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 16
_FOLDER = -1  # in the place of a size


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a path holds."""

    sizes: dict[str, int]  # name below the path ("": the path itself, a file) -> size in bytes; folders -1
    samples: dict[str, str]  # name -> hash of blocks of the file; of a small one all of it
    is_whole: bool  # everything that lies there is in `sizes`
    problem: str = ""  # the first thing that could not be read


def look_into(path: Path, *, within_s: float) -> Contents | None:
    """Return what a file or a folder holds; None: it is not there.

    Names that begin with a dot are passed over: those are downloads at work, indices and locks, which may differ.

    Args:
        within_s: how long it may take. One file is sampled in any case.
    """
    deadline = time.monotonic() + within_s
    if not path.exists():
        return None
    listing = _Listing(path, deadline)
    samples: dict[str, str] = {}
    # By the hashes of their names: wherever a listing ends, on each machine mostly the same files are chosen.
    files = sorted((name for name, size in listing.sizes.items() if size >= 0), key=lambda name: xxh3_64_hexdigest(os.fsencode(name)))
    for name in files[:_MOST_SAMPLED]:
        if samples and time.monotonic() > deadline:
            break
        try:
            samples[name] = _sampled(path / name if name else path, listing.sizes[name])
        except OSError as error:
            listing.problems.append(f"{name or path} cannot be read: {error.strerror}")
    problem = listing.problems[0] if listing.problems else ""
    return Contents(sizes=listing.sizes, samples=samples, is_whole=listing.is_whole, problem=problem)


class _Listing:
    """Names and sizes, all of a folder before those of the folders in it, until there are enough or the time is over."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.sizes: dict[str, int] = {}
        self.problems: list[str] = []
        self.is_whole = True
        self._path, self._deadline = path, deadline
        if not path.is_dir():
            self.sizes[""] = path.stat().st_size
            return
        waiting = deque([""])
        while waiting and self.is_whole:
            below = waiting.popleft()
            try:
                waiting += self._add(below)
            except OSError as error:
                self.problems.append(f"{below or path} cannot be read: {error.strerror}")

    def _add(self, below: str) -> list[str]:
        """Add what lies in a folder, and return the folders in it."""
        with os.scandir(self._path / below) as found:
            entries = list(islice(takewhile(lambda _: time.monotonic() < self._deadline, found), _MOST_IN_A_FOLDER))
            self.is_whole = next(found, None) is None  # a folder may have millions, and only to name them takes long
        folders = []
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if len(self.sizes) == _MOST_NAMES or time.monotonic() > self._deadline:
                self.is_whole = False
                break
            name = f"{below}/{entry.name}".lstrip("/")
            try:
                is_folder = entry.is_dir()
                self.sizes[name] = _FOLDER if is_folder else entry.stat().st_size
                folders += [name] if is_folder else []
            except OSError as error:  # a link that leads nowhere
                self.problems.append(f"{name} cannot be read: {error.strerror}")
        return folders


def _sampled(file: Path, size: int) -> str:
    """Return the hash of a file's first and last block and of some between them; of a small file the hash of all of it."""
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        return xxh3_64_hexdigest(file.read_bytes())
    found = xxh3_64()
    with file.open("rb", buffering=0) as stream:
        for number in range(_NUM_BLOCKS):
            stream.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            found.update(stream.read(_BLOCK_BYTES))
    return found.hexdigest()
