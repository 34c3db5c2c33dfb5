"""Checks that a checkpoint is what was written, before anything of it is used.

Nothing leads out of its folder: names without a path, plain files, no links, and only files of this user or root.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ddp_train.distributed.world import World, alone
from ddp_train.errors import UserError
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, STEP_FOLDERS, RunFolder, step_folder

FORMAT = 2
"""Of the folder; it grows when older programs cannot read a new folder. Since 2 a tensor may be sharded among the ranks."""
_READABLE = (1, 2)

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
_MAX_TEXT = 64 << 20  # bytes of a manifest: some hundred thousand files
_CHUNK = 8 << 20


_ANY = object()


def require_origin(checkpoint: Path, part: str, *, step: Any, run: Any = _ANY) -> None:
    """Refuse a part that is of another step, or of another run than the folder of its checkpoint. Raises CheckpointError."""
    if checkpoint.name.startswith("step_") and (type(step) is not int or checkpoint.name != step_folder(step)):
        raise CheckpointError(happened=f"{part} is of step {step}")
    run_id = RunFolder(checkpoint.parent.parent).run_id() if run is not _ANY else None
    if run_id is not None and run != run_id:
        raise CheckpointError(happened=f"it is of another run ({part} says {run}, and the run of this folder is {run_id})")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


Files = Mapping[str, Mapping[str, Any]]
"""What the manifest says of files, by name: bytes and xxh3_128."""


class CheckpointError(UserError):
    """A checkpoint is damaged, foreign or incomplete."""


def verify(checkpoint: Path, *, on_progress: Callable[[], None] = lambda: None) -> str:
    """Compare every file with the manifest, and that with its mark; return what is wrong, or "". `on_progress` is called every 8 MiB."""
    return _problem(lambda: _compare(checkpoint, _listed(checkpoint), on_progress))


def newest_good(folder: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> Path | None:
    """Return the newest checkpoint whose files are what its manifest says; rank 0 prints why it skips newer ones. Collective.

    Each rank reads some of the files (no world: this process reads them all), and meanwhile calls `on_progress`.
    """
    world = world or alone()
    for candidate in world.from_main(lambda: sorted(folder.glob(STEP_FOLDERS), reverse=True)):
        problem = verify_together(candidate, world, on_progress=on_progress)
        if not problem:
            return candidate
        world.print(f"checkpoint {candidate.name} is not used: {problem}")
    return None


def verify_together(checkpoint: Path, world: World, *, on_progress: Callable[[], None] = lambda: None) -> str:
    """Return what is wrong with a checkpoint, or "", the same on all ranks, each of which reads some of its files. Collective.

    Rank 0 alone reads the manifest and lists the folder: both are long for thousands of ranks; each rank gets the lines of its files.
    """

    def shares() -> list[tuple[str, Files]]:
        files: dict[str, Any] = {}
        problem = _problem(lambda: files.update(_listed(checkpoint)))
        lines = list(files.items())
        return [(problem, dict(lines[rank :: world.size])) for rank in range(world.size)]

    problem, own = world.each_from_main(shares)
    return problem or world.first_of(_problem(lambda: _compare(checkpoint, own, on_progress)))


def _problem(check: Callable[[], None]) -> str:
    """Return what is wrong with a checkpoint, or ""."""
    try:
        check()
    except CheckpointError as error:
        return error.happened
    except OSError as error:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return ""


def _listed(checkpoint: Path) -> Files:
    """Return the manifest's lines about files, after comparing the manifest with its mark and with the folder's content."""
    with _opened(checkpoint) as folder:
        manifest = _manifest(folder)
        require_origin(checkpoint, MANIFEST, step=manifest["step"], run=manifest.get("run"))
        files: Files = manifest["files"]
        if foreign := sorted(set(os.listdir(folder)) - {MANIFEST, COMPLETE, *files}):
            raise CheckpointError(happened=f"{foreign[0]} is not in {MANIFEST}")
        return files


def _compare(checkpoint: Path, files: Files, on_progress: Callable[[], None]) -> None:
    """Compare some files with what the manifest says of them."""
    with _opened(checkpoint) as folder:
        for name, expected in files.items():
            with _file(folder, name) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != expected["bytes"]:
                    raise CheckpointError(happened=f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
                digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(min(_CHUNK, max(size, 1))))
                while count := os.readv(descriptor, [chunk]):
                    digest.update(chunk[:count])
                    on_progress()
            if digest.hexdigest() != expected["xxh3_128"]:
                raise CheckpointError(happened=f"{name} is damaged (its xxh3-128 differs)")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, compared with its mark: step, world_size, config_sha256, torch, facts, files.

    Raises CheckpointError: it is damaged, or of another format. OSError: it cannot be read.
    """
    with _opened(checkpoint) as folder:
        return _manifest(folder)


@contextmanager
def opened(checkpoint: Path, name: str) -> Iterator[int]:
    """Open one file of a checkpoint for reading. Raises CheckpointError: it is missing or not a plain file of this user's or root's."""
    with _opened(checkpoint) as folder, _file(folder, name) as descriptor:
        yield descriptor


@contextmanager
def _opened(checkpoint: Path) -> Iterator[int]:
    """Open the folder itself; a link to one is refused."""
    try:
        descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(happened=f"{checkpoint.name} is not a folder that can be read ({error.strerror})") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _file(folder: int, name: str) -> Iterator[int]:
    if not _NAME.fullmatch(name):
        raise CheckpointError(happened=f"{name!r} is no name of a file in a checkpoint")
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # non-blocking: it could be a pipe
    except FileNotFoundError:
        raise CheckpointError(happened=f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(happened=f"{name} cannot be opened ({error.strerror}; links are not followed)") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(happened=f"{name} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _manifest(folder: int) -> dict[str, Any]:
    with _file(folder, COMPLETE) as descriptor:
        mark = os.read(descriptor, 128).decode(errors="replace").strip()
    with _file(folder, MANIFEST) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > _MAX_TEXT:
            raise CheckpointError(happened=f"{MANIFEST} has {size:,} bytes")
        text = b"".join(iter(lambda: os.read(descriptor, _CHUNK), b""))
    if hashlib.sha256(text).hexdigest() != mark:
        raise CheckpointError(happened=f"{MANIFEST} is damaged (its sha256 is not what {COMPLETE} says)")
    try:
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] not in _READABLE:
            raise CheckpointError(happened=f"{MANIFEST} is of format {manifest['format']}", expected=f"format {FORMAT}")
        kinds = {"step": int, "world_size": int, "config_sha256": str, "torch": str, "facts": dict, "files": dict}
        if not all(type(manifest[key]) is kind for key, kind in kinds.items()):
            raise ValueError("a value is of another kind")
        files = manifest["files"]
        if not all(type(file["bytes"]) is int and type(file["xxh3_128"]) is str for file in files.values()):
            raise ValueError("a file has no size or no hash")
        if wrong := next((name for name in files if not _NAME.fullmatch(name)), None):
            raise CheckpointError(happened=f"{wrong!r} is no name of a file in a checkpoint")
        if manifest["step"] < 0 or set(files) != {rank_file(rank) for rank in range(min(manifest["world_size"], len(files) + 1))}:
            raise ValueError(f"{manifest['world_size']} ranks at step {manifest['step']} do not leave {len(manifest['files'])} files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(happened=f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    return manifest
