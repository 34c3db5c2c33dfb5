"""Which checkpoints stay when a new one is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddp_train.checkpoint.catalog import Keep, saved, to_remove


def remove_old(folder: Path, keep: Keep) -> None:
    """Remove the checkpoints that need not stay. Called after a new one is published, by rank 0."""
    for old in to_remove(saved(folder), keep):
        gone = old.path.rename(old.path.with_name(f".removed_{old.path.name}"))  # never half a checkpoint under a good name
        shutil.rmtree(gone)
