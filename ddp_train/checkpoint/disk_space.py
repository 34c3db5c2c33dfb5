"""Whether checkpoints can be saved at all: found out before training, and not hours later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ddp_train.errors import EnvironmentRefuses

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def probe(folder: Path, checkpoint_bytes: int, *, wanted: int) -> str:
    """Write, synchronise, rename and remove a file where checkpoints go, and see whether there is room for them.

    Args:
        folder: of the checkpoints; is created.
        checkpoint_bytes: of one of them, estimated.
        wanted: how many there are at most, the one that is being written among them.

    Returns:
        A warning when not all of them fit, or "".

    Raises:
        EnvironmentRefuses: nothing can be written there, or there is no room for another one, or not for two.
    """
    try:
        _write_probe(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise EnvironmentRefuses(
            key="hydra.run.dir",
            happened=f"{folder} cannot be written: {error.strerror or error}",
            expected="a folder in which files can be written, synchronised, renamed and removed",
            fix="mend it, or hydra.run.dir=FOLDER on another disk",
        ) from None
    there = sum(1 for _ in folder.glob("step_*"))
    more = free // checkpoint_bytes
    needed = max(1, 2 - there) * checkpoint_bytes
    estimate = f"one takes {in_units(checkpoint_bytes)} (weights and optimizer, estimated)"
    if free < needed:
        raise EnvironmentRefuses(
            key="checkpoint",
            happened=f"{folder} has {in_units(free)} free, and needs {in_units(needed)}: {estimate}",
            expected="room for two checkpoints, so that the old one stays until the new one is complete",
            fix="free space there, or hydra.run.dir=FOLDER on a larger disk",
        )
    if there + more >= wanted:
        return ""
    return (
        f"checkpoints: {in_units(free)} free in {folder}, but {in_units((wanted - there) * checkpoint_bytes)} may be needed"
        f" for {wanted - there} more: {estimate}; a smaller checkpoint.keep_last or keep_best needs less"
    )


def _write_probe(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written, renamed = (folder / f".probe_{os.getpid()}{suffix}" for suffix in ("", "_renamed"))
    try:
        with written.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        written.rename(renamed)
    finally:
        for path in (written, renamed):
            path.unlink(missing_ok=True)


def in_units(num_bytes: int) -> str:
    """Write a number of bytes in the largest unit that leaves a whole part."""
    power = min(len(_UNITS) - 1, (len(str(num_bytes)) - 1) // 3)
    return f"{num_bytes / 1000**power:.{1 if power else 0}f} {_UNITS[power]}"
