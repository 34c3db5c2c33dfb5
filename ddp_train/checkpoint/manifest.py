"""manifest.json, which lists a checkpoint's files, and the careful opening of files that others may have made. Imports no torch.

`save` writes the manifest, `read` and `catalog` read it. Nothing leads out of the folder: names without a path, plain files, no links.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from ddp_train.errors import UserError
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, RunFolder, step_folder
from ddp_train.traits import Goal

_FORMAT = 6  # of the folder and of what a run saves in it; another one cannot be read
_MAX_BYTES = 64 << 20  # some hundred thousand files
_LARGEST = sys.float_info.max
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
CHUNK_BYTES = 8 << 20  # read, or written, and hashed while they are in the cache
_ANY = object()


class CheckpointError(UserError):
    """A checkpoint is damaged, foreign or incomplete."""


class FileEntry(TypedDict):
    """A file as the manifest lists it."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The metric by which checkpoints are compared."""

    metric: str  # "eval/loss", as in result.json
    goal: Goal

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        """Return a metric's value, the larger the better; None where it was not measured or is not finite: never the best."""
        value = metrics.get(self.metric)
        if not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
            return None
        return float(value) if self.goal == "max" else -float(value)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    world_size: int
    run: str | None = None  # the id of the run that saved it; None: it does not say
    config_sha256: str
    torch: str  # its version
    metrics: Mapping[str, Any]  # those of its step
    ranked_by: Ranking | None  # the metric by which its run compared checkpoints then
    files: Mapping[str, FileEntry]  # name -> entry; each rank has one file

    def to_bytes(self) -> bytes:
        facts = {"metrics": self.metrics, "ranked_by": self.ranked_by and asdict(self.ranked_by)}
        head = {"format": _FORMAT, "torch": self.torch, "step": self.step, "world_size": self.world_size, "run": self.run}
        return json.dumps({**head, "config_sha256": self.config_sha256, "facts": facts, "files": self.files}, indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Read the content of a file, which may be forged. Raises CheckpointError: it is damaged, or of another format."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise CheckpointError(happened=f"{MANIFEST} is of format {content['format']}", expected=f"format {_FORMAT}")
            kinds = {"step": int, "world_size": int, "config_sha256": str, "torch": str, "facts": dict, "files": dict}
            if not all(type(content[key]) is kind for key, kind in kinds.items()):
                raise ValueError("a value is of another kind")
            step, world_size, facts, files = (content[key] for key in ("step", "world_size", "facts", "files"))
            if not all(type(file["bytes"]) is int and type(file["xxh3_128"]) is str for file in files.values()):
                raise ValueError("a file has no size or no hash")
            for name in files:
                _require_name(name)
            if step < 0 or set(files) != {rank_file(rank) for rank in range(min(world_size, len(files) + 1))}:
                raise ValueError(f"{world_size} ranks at step {step} do not leave {len(files)} files")
            ranked_by = facts.get("ranked_by")
            goal: Goal = "max" if ranked_by and ranked_by["goal"] == "max" else "min"
            return cls(
                step=step,
                world_size=world_size,
                run=content.get("run"),
                config_sha256=content["config_sha256"],
                torch=content["torch"],
                metrics=dict(facts.get("metrics", {})),
                ranked_by=Ranking(metric=str(ranked_by["metric"]), goal=goal) if ranked_by else None,
                files=files,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(happened=f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from None


def read_text(descriptor: int) -> bytes:
    """Return the content of an open manifest. Raises CheckpointError: no real one is that large."""
    if (size := os.fstat(descriptor).st_size) > _MAX_BYTES:
        raise CheckpointError(happened=f"{MANIFEST} has {size:,} bytes")
    return b"".join(iter(lambda: os.read(descriptor, CHUNK_BYTES), b""))


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@contextmanager
def opened(checkpoint: Path, name: str) -> Iterator[int]:
    """Open one file of a checkpoint for reading. Raises CheckpointError: it is missing or not a plain file."""
    with opened_folder(checkpoint) as folder, opened_file(folder, name) as descriptor:
        yield descriptor


@contextmanager
def opened_folder(checkpoint: Path) -> Iterator[int]:
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
def opened_file(folder: int, name: str) -> Iterator[int]:
    _require_name(name)
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


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise CheckpointError(happened=f"{name!r} is not the name of a file in a checkpoint")


def require_origin(checkpoint: Path, source: str, *, step: Any, run: Any = _ANY) -> None:
    """Refuse a `source` (a file or manifest) of another step or run than its checkpoint's folder. Raises CheckpointError."""
    if checkpoint.name.startswith("step_") and (type(step) is not int or checkpoint.name != step_folder(step)):
        raise CheckpointError(happened=f"{source} is of step {step}")
    run_id = RunFolder.of_checkpoint(checkpoint).run_id() if run is not _ANY else None
    if run_id is not None and run != run_id:
        raise CheckpointError(happened=f"it is of another run ({source} says {run}, and the run of this folder is {run_id})")


def damage_found_by(check: Callable[[], None]) -> str | None:
    """Return the damage that a check of files finds, or None."""
    try:
        check()
    except CheckpointError as error:
        return error.happened
    except OSError as error:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return None


def listed_files(checkpoint: Path) -> Mapping[str, FileEntry]:
    """Return the manifest's lines about files, after comparing the manifest with its mark and with the folder's content."""
    with opened_folder(checkpoint) as folder:
        manifest = _manifest(folder)
        require_origin(checkpoint, MANIFEST, step=manifest.step, run=manifest.run)
        if foreign := sorted(set(os.listdir(folder)) - {MANIFEST, COMPLETE, *manifest.files}):
            raise CheckpointError(happened=f"{foreign[0]} is not in {MANIFEST}")
        return manifest.files


def compare_files(checkpoint: Path, files: Mapping[str, FileEntry], on_progress: Callable[[], None]) -> None:
    """Compare some files with the manifest's entries; call `on_progress` every 8 MiB. Raises CheckpointError, OSError."""
    with opened_folder(checkpoint) as folder:
        for name, expected in files.items():
            with opened_file(folder, name) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != expected["bytes"]:
                    raise CheckpointError(happened=f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
                digest = xxhash.xxh3_128()
                chunk = memoryview(bytearray(min(CHUNK_BYTES, max(size, 1))))
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
