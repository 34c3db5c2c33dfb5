"""What is wrong with the files of a checkpoint, by its manifest. Imports no torch: `verify` divides the work among ranks."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ddp_train.checkpoint.manifest import CheckpointError, FileEntry, Manifest, opened_file, opened_folder, read_text
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, RunFolder, step_folder

CHUNK_BYTES = 8 << 20
_ANY = object()


def require_origin(checkpoint: Path, source: str, *, step: Any, run: Any = _ANY) -> None:
    """Refuse what is of another step, or of another run than the folder of its checkpoint. Raises CheckpointError."""
    if checkpoint.name.startswith("step_") and (type(step) is not int or checkpoint.name != step_folder(step)):
        raise CheckpointError(happened=f"{source} is of step {step}")
    run_id = RunFolder.of_checkpoint(checkpoint).run_id() if run is not _ANY else None
    if run_id is not None and run != run_id:
        raise CheckpointError(happened=f"it is of another run ({source} says {run}, and the run of this folder is {run_id})")


def problem_in(check: Callable[[], None]) -> str:
    """Return the problem that a check finds, or ""."""
    try:
        check()
    except CheckpointError as error:
        return error.happened
    except OSError as error:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return ""


def listed_files(checkpoint: Path) -> Mapping[str, FileEntry]:
    """Return the manifest's lines about files, after comparing the manifest with its mark and with the folder's content."""
    with opened_folder(checkpoint) as folder:
        manifest = _manifest(folder)
        require_origin(checkpoint, MANIFEST, step=manifest.step, run=manifest.run)
        if foreign := sorted(set(os.listdir(folder)) - {MANIFEST, COMPLETE, *manifest.files}):
            raise CheckpointError(happened=f"{foreign[0]} is not in {MANIFEST}")
        return manifest.files


def compare_files(checkpoint: Path, files: Mapping[str, FileEntry], on_progress: Callable[[], None]) -> None:
    """Compare some files with what the manifest says of them; call `on_progress` every 8 MiB. Raises CheckpointError, OSError."""
    with opened_folder(checkpoint) as folder:
        for name, expected in files.items():
            with opened_file(folder, name) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != expected["bytes"]:
                    raise CheckpointError(happened=f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
                digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK_BYTES, max(size, 1))))
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
