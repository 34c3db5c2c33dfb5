"""Checks that a checkpoint is what was written, before anything of it is used. Collective: each rank reads some of the files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_train.checkpoint.manifest import FileEntry, compare_files, damage_found_by, listed_files
from ddp_train.distributed.world import World, alone
from ddp_train.run_folder.paths import step_folders


def newest_good(folder: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> Path | None:
    """Return the newest checkpoint whose files are what its manifest says; rank 0 prints why it skips newer ones. Collective.

    Each rank reads some of the files (no world: this process reads them all), and meanwhile calls `on_progress`.
    """
    world = world or alone()
    for _, candidate in reversed(world.from_main(lambda: step_folders(folder))):
        damage = damage_of(candidate, world, on_progress=on_progress)
        if damage is None:
            return candidate
        world.print(f"checkpoint {candidate.name} is not used: {damage}")
    return None


def damage_of(checkpoint: Path, world: World | None = None, *, on_progress: Callable[[], None] = lambda: None) -> str | None:
    """Compare every file with the manifest, and that with its mark; return what is wrong, or None, the same on all ranks. Collective.

    Each rank reads some of the files (no world: this process reads them all), and calls `on_progress` every 8 MiB. Rank 0 alone reads the
    manifest and lists the folder: both are long for thousands of ranks; each rank gets the lines of its files.
    """
    world = world or alone()

    def shares() -> list[tuple[str | None, Mapping[str, FileEntry]]]:
        files: dict[str, FileEntry] = {}
        damage = damage_found_by(lambda: files.update(listed_files(checkpoint)))
        lines = list(files.items())
        return [(damage, dict(lines[rank :: world.size])) for rank in range(world.size)]

    damage, files_of_rank = world.each_from_main(shares)
    return damage or world.first_of(damage_found_by(lambda: compare_files(checkpoint, files_of_rank, on_progress)))
