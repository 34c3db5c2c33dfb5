"""The folder of one checkpoint, and those beside it: published by a rename, verified against a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files are what its manifest says, and why newer ones were passed over."""
    refused: list[str] = []
    for candidate in sorted(folder.glob("step_*"), reverse=True):
        problem = verify(candidate)
        if not problem:
            return candidate, refused
        refused.append(f"checkpoint {candidate.name} is not used: {problem}")
    return None, refused


def verify(checkpoint: Path) -> str:
    """Compare every file with the manifest; return what is wrong, or ""."""
    if not (checkpoint / COMPLETE).exists() or not (checkpoint / MANIFEST).exists():
        return f"{COMPLETE} or {MANIFEST} is missing"
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _sha256(path) != expected["sha256"]:
                return f"{name} is damaged (its sha256 differs)"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return ""


def set_aside_after(checkpoint: Path) -> list[str]:
    """Rename the checkpoints of later steps, which a run that continues from `checkpoint` leaves behind; return their new names."""
    renamed = []
    for later in sorted(path for path in checkpoint.parent.glob("step_*") if path.name > checkpoint.name):
        free = (later.with_name(f"aside_{number}_{later.name}") for number in count())
        renamed.append(later.rename(next(path for path in free if not path.exists())).name)
    return renamed


def publish(partial: Path, final: Path, facts: Mapping[str, Any]) -> None:
    """Add manifest and mark, make everything durable, and rename: from then on the checkpoint exists."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(partial.iterdir())}
    manifest = {**facts, "torch": torch.__version__, "files": files}
    for name, text in ((MANIFEST, json.dumps(manifest, indent=2) + "\n"), (COMPLETE, "")):
        with (partial / name).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
