"""Checks that a checkpoint is what was written, before anything of it is used."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ddp_train.checkpoint.manifest import CheckpointError, FileEntry, Manifest, opened_file, opened_folder, read_text
from ddp_train.distributed.world import World, alone
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, RunFolder, step_folder, step_folders

_CHUNK = 8 << 20
_ANY = object()


def require_origin(checkpoint: Path, source: str, *, step: Any, run: Any = _ANY) -> None:
    """Refuse what is of another step, or of another run than the folder of its checkpoint. Raises CheckpointError."""
    if checkpoint.name.startswith("step_") and (type(step) is not int or checkpoint.name != step_folder(step)):
        raise CheckpointError(happened=f"{source} is of step {step}")
    run_id = RunFolder.of_checkpoint(checkpoint).run_id() if run is not _ANY else None
    if run_id is not None and run != run_id:
        raise CheckpointError(happened=f"it is of another run ({source} says {run}, and the run of this folder is {run_id})")


def newest_good(folder: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> Path | None:
    """Return the newest checkpoint whose files are what its manifest says; rank 0 prints why it skips newer ones. Collective.

    Each rank reads some of the files (no world: this process reads them all), and meanwhile calls `on_progress`.
    """
    world = world or alone()
    for _, candidate in reversed(world.from_main(lambda: step_folders(folder))):
        problem = problem_of(candidate, world, on_progress=on_progress)
        if not problem:
            return candidate
        world.print(f"checkpoint {candidate.name} is not used: {problem}")
    return None


def problem_of(checkpoint: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> str:
    """Compare every file with the manifest, and that with its mark; return what is wrong, or "", the same on all ranks. Collective.

    Each rank reads some of the files (no world: this process reads them all), and calls `on_progress` every 8 MiB. Rank 0 alone reads the
    manifest and lists the folder: both are long for thousands of ranks; each rank gets the lines of its files.
    """
    world = world or alone()

    def shares() -> list[tuple[str, Mapping[str, FileEntry]]]:
        files: dict[str, FileEntry] = {}
        problem = _problem(lambda: files.update(_listed(checkpoint)))
        lines = list(files.items())
        return [(problem, dict(lines[rank :: world.size])) for rank in range(world.size)]

    problem, files_of_rank = world.each_from_main(shares)
    return problem or world.first_of(_problem(lambda: _compare(checkpoint, files_of_rank, on_progress)))


def _problem(check: Callable[[], None]) -> str:
    """Return the problem that a check finds, or ""."""
    try:
        check()
    except CheckpointError as error:
        return error.happened
    except OSError as error:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return ""


def _listed(checkpoint: Path) -> Mapping[str, FileEntry]:
    """Return the manifest's lines about files, after comparing the manifest with its mark and with the folder's content."""
    with opened_folder(checkpoint) as folder:
        manifest = _manifest(folder)
        require_origin(checkpoint, MANIFEST, step=manifest.step, run=manifest.run)
        if foreign := sorted(set(os.listdir(folder)) - {MANIFEST, COMPLETE, *manifest.files}):
            raise CheckpointError(happened=f"{foreign[0]} is not in {MANIFEST}")
        return manifest.files


def _compare(checkpoint: Path, files: Mapping[str, FileEntry], on_progress: Callable[[], None]) -> None:
    """Compare some files with what the manifest says of them."""
    with opened_folder(checkpoint) as folder:
        for name, expected in files.items():
            with opened_file(folder, name) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != expected["bytes"]:
                    raise CheckpointError(happened=f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
                digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(min(_CHUNK, max(size, 1))))
                while count := os.readv(descriptor, [chunk]):
                    digest.update(chunk[:count])
                    on_progress()
            if digest.hexdigest() != expected["xxh3_128"]:
                raise CheckpointError(happened=f"{name} is damaged (its xxh3-128 differs)")


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, compared with its mark. Raises CheckpointError: it is damaged or of another format; OSError."""
    with opened_folder(checkpoint) as folder:
        return _manifest(folder)


def _manifest(folder: int) -> Manifest:
    with opened_file(folder, COMPLETE) as descriptor:
        mark = os.read(descriptor, 128).decode(errors="replace").strip()
    with opened_file(folder, MANIFEST) as descriptor:
        text = read_text(descriptor)
    if hashlib.sha256(text).hexdigest() != mark:
        raise CheckpointError(happened=f"{MANIFEST} is damaged (its sha256 is not what {COMPLETE} says)")
    return Manifest.from_bytes(text)
