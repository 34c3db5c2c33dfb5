"""What lies below a path, in a few kilobytes: names, sizes and hashes, so that two machines can compare their data and their code.

It cannot see everything: of a large file blocks are read, of many files some, and nothing after the time is over. Two machines compare only
what both have looked at.
"""

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_hexdigest

from ddp_train import FOLDER
from ddp_train.errors import ConfigError
from ddp_train.launch.source_copy import source_names

_MAX_DATA_FILES = 2000
_MAX_SOURCE_FILES = 3000
_MAX_IN_A_FOLDER = 20_000
_MAX_SAMPLED = 64
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 16
_FOLDER = -1  # in the place of a size


@dataclass(frozen=True, kw_only=True)
class FileList:
    """Files of a machine, by their names ("": the path itself, a file)."""

    sizes: dict[str, int]  # of data, in bytes; folders -1
    hashes: dict[str, str]  # of source, and of samples of data: of a large file some blocks
    is_whole: bool  # everything that lies there is named
    listed_by: str = "folder"  # or "git": what one names the other may pass over
    problem: str = ""  # the first thing that could not be read


def list_data(path: Path, *, within_s: float) -> FileList | None:
    """List a file or a folder of data; None: it is not there. One file is sampled, however long it takes.

    Names that begin with a dot are passed over: downloads at work, indices and locks, which may differ.
    """
    deadline = time.monotonic() + within_s
    if not path.exists():
        return None
    sizes, problems, is_whole = _listing(path, deadline)
    hashes: dict[str, str] = {}
    # By the hashes of their names: wherever a listing ends, on each machine mostly the same files are chosen.
    files = sorted((name for name, size in sizes.items() if size >= 0), key=lambda name: xxh3_64_hexdigest(os.fsencode(name)))
    for name in files[:_MAX_SAMPLED]:
        if hashes and time.monotonic() > deadline:
            break
        try:
            hashes[name] = _sample(path / name if name else path, sizes[name])
        except OSError as error:
            problems.append(f"{name or path} cannot be read: {error.strerror}")
    return FileList(sizes=sizes, hashes=hashes, is_whole=is_whole, problem=next(iter(problems), ""))


def list_source(source_copy: Path | None, *, within_s: float) -> FileList:
    """Hash the Python files that the ranks of this machine would run: ddp_train's own, and the user's.

    `source_copy`: the folder of the frozen code; None: what the repository in which the user stands tracks or does not ignore, or else
    all Python files below where they stand. `within_s`: how long it may take; our own files are read in any case.
    """
    deadline, own = time.monotonic() + within_s, FOLDER.resolve()
    hashes = {f"{FOLDER.name}/{file.relative_to(FOLDER)}": xxh3_64_hexdigest(file.read_bytes()) for file in sorted(FOLDER.rglob("*.py"))}
    listed_by, is_whole = "folder", True
    try:
        if source_copy is None:
            top, names, listed_by = source_names(Path.cwd())
        else:
            top, names = source_copy, (str(file.relative_to(source_copy)) for file in sorted(source_copy.rglob("*.py")))
        for name in names:
            if len(hashes) >= _MAX_SOURCE_FILES or time.monotonic() > deadline:
                is_whole = False
                break
            if name.endswith(".py") and not (top / name).resolve().is_relative_to(own):
                with suppress(OSError):  # a link that leads nowhere
                    hashes[name] = xxh3_64_hexdigest((top / name).read_bytes())
    except ConfigError:  # more files than anybody would look at
        is_whole = False
    return FileList(sizes={}, hashes=hashes, is_whole=is_whole, listed_by=listed_by)


def _listing(path: Path, deadline: float) -> tuple[dict[str, int], list[str], bool]:
    """Return names with sizes, all of a folder before those of the folders in it, until there are enough or the time is over.

    With it what could not be read, and whether everything is named.
    """
    sizes, problems = dict[str, int](), list[str]()
    if not path.is_dir():
        return {"": path.stat().st_size}, problems, True
    waiting = deque([""])
    while waiting:
        below = waiting.popleft()
        try:
            with os.scandir(path / below) as stream:
                entries = list(islice(takewhile(lambda _: time.monotonic() < deadline, stream), _MAX_IN_A_FOLDER))
                is_whole = next(stream, None) is None  # a folder may have millions, and only to name them takes long
        except OSError as error:
            problems.append(f"{below or path} cannot be read: {error.strerror}")
            continue
        for entry in sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name):
            if len(sizes) == _MAX_DATA_FILES or time.monotonic() > deadline:
                return sizes, problems, False
            name = f"{below}/{entry.name}".lstrip("/")
            try:
                is_folder = entry.is_dir()
                sizes[name] = _FOLDER if is_folder else entry.stat().st_size
                waiting.extend([name] * is_folder)
            except OSError as error:  # a link that leads nowhere
                problems.append(f"{name} cannot be read: {error.strerror}")
        if not is_whole:
            return sizes, problems, False
    return sizes, problems, True


def _sample(file: Path, size: int) -> str:
    """Return the hash of a file's first and last block and of some between them; of a small file the hash of all of it."""
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        return xxh3_64_hexdigest(file.read_bytes())
    digest = xxh3_64()
    with file.open("rb", buffering=0) as stream:
        for number in range(_NUM_BLOCKS):
            stream.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()
