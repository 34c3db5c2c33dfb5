"""The folders of checkpoints: their names, which is the newest good one, and what is in the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from ddp_train.checkpoint.catalog import every
from ddp_train.checkpoint.verify import verify_files, verify_folder
from ddp_train.distributed.world import World, alone

_DEBRIS = (".partial_*", ".removed_*")  # of a process that was killed while it saved, or while it removed


def newest_good(folder: Path, world: World | None = None, *, moves: Callable[[], None] = lambda: None) -> Path | None:
    """Return the newest checkpoint whose files are what its manifest says; rank 0 prints why newer ones are passed over. Collective.

    Args:
        world: the ranks, of which each reads some of the files; None: this process reads them all.
        moves: called while this rank reads.
    """
    world = world or alone()
    candidates: list[Path] = world.from_main(sorted(folder.glob("step_*"), reverse=True))
    for candidate in candidates:
        problem = verify_together(candidate, world, moves=moves)
        if not problem:
            return candidate
        if world.is_main:
            print(f"checkpoint {candidate.name} is not used: {problem}", flush=True)
    return None


def verify_together(checkpoint: Path, world: World, *, moves: Callable[[], None] = lambda: None) -> str:
    """Return what is wrong with a checkpoint, or "", the same on all ranks, each of which reads some of its files. Collective.

    Rank 0 alone reads the manifest and lists the folder: for thousands of ranks both are long, and each gets the lines of its own files.
    """
    problem, files = verify_folder(checkpoint) if world.is_main else ("", {})
    lines = list(files.items())
    shares = [(problem, dict(lines[rank :: world.size])) for rank in range(world.size)] if world.is_main else []
    problem, own = world.each_from_main(shares)
    return problem or world.first_of(verify_files(checkpoint, own, moves=moves))


def set_aside_after(folder: Path, chosen: Path | None) -> list[str]:
    """Rename the checkpoints of later steps, which a run that continues from `chosen` leaves behind, and those of other runs.

    Returns the new names.

    Args:
        chosen: None: the run starts again, and leaves all of them.
    """
    renamed, others = [], [each.path for each in every(folder) if each.is_foreign]
    for later in sorted(path for path in folder.glob("step_*") if chosen is None or path.name > chosen.name or path in others):
        free = (later.with_name(f"aside_{number}_{later.name}") for number in count())
        renamed.append(later.rename(next(path for path in free if not path.exists())).name)
    return renamed


def remove_debris(folder: Path) -> list[str]:
    """Remove what was being written or removed when a run was killed; return the names. Nobody may be saving in the folder."""
    found = sorted(path for pattern in _DEBRIS for path in folder.glob(pattern))
    for path in found:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    return [path.name for path in found]
