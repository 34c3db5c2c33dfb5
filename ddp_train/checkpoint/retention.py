"""Which checkpoints stay when a new one is there."""

from __future__ import annotations

import shutil
from pathlib import Path


def remove_old(folder: Path, *, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints. Called after a new one is published, by rank 0."""
    for old in sorted(folder.glob("step_*"))[:-keep_last]:
        gone = old.rename(old.with_name(f".removed_{old.name}"))  # never half a checkpoint under a good name
        shutil.rmtree(gone)
