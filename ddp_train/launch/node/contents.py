"""What a path holds, told in a few kilobytes: names, sizes, and hashes of samples, so that two machines can compare theirs.

It cannot see everything: of a large file blocks are read, of many files some, and what is over when the time is over is not looked at.
Two machines compare only what both have looked at.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

_MOST_NAMES = 2000
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
    problems: list[str] = []
    sizes: dict[str, int] = {}
    is_whole = True
    for name, size in _names(path, problems):
        if len(sizes) == _MOST_NAMES or time.monotonic() > deadline:
            is_whole = False
            break
        sizes[name] = size
    samples: dict[str, str] = {}
    # By the hashes of their names: wherever a listing ends, on each machine mostly the same files are chosen.
    files = sorted((name for name, size in sizes.items() if size >= 0), key=lambda name: xxh3_64_hexdigest(os.fsencode(name)))
    for name in files[:_MOST_SAMPLED]:
        if samples and time.monotonic() > deadline:
            break
        try:
            samples[name] = _sampled(path / name if name else path, sizes[name])
        except OSError as error:
            problems.append(f"{name or path} cannot be read: {error.strerror}")
    return Contents(sizes=sizes, samples=samples, is_whole=is_whole, problem=problems[0] if problems else "")


def _names(path: Path, problems: list[str]) -> Iterator[tuple[str, int]]:
    """Yield names and sizes, all of a folder before those of the folders in it."""
    if not path.is_dir():
        yield "", path.stat().st_size
        return
    waiting = deque([""])
    while waiting:
        below = waiting.popleft()
        try:
            entries = sorted(os.scandir(path / below), key=lambda entry: entry.name)
        except OSError as error:
            problems.append(f"{below or path} cannot be read: {error.strerror}")
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = f"{below}/{entry.name}".lstrip("/")
            try:
                if entry.is_dir():
                    waiting.append(name)
                    yield name, _FOLDER
                else:
                    yield name, entry.stat().st_size
            except OSError as error:  # a link that leads nowhere
                problems.append(f"{name} cannot be read: {error.strerror}")


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
