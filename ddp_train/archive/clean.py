"""Which runs, or which of their checkpoints, can be removed, and removing them: what no rule keeps, and nobody works on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.index import Index, size_of
from ddp_train.config.tree import leaves
from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep
from ddp_train.system import folder_lock
from ddp_train.system.files import remove

_POINTS_ELSEWHERE = "init_from IS NOT NULL OR after IS NOT NULL OR resume NOT IN ('auto', 'never')"


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is to be removed of one run."""

    run: Path
    path: Path  # the run folder, or its checkpoints
    sweep: Path | None  # that the run is a job of
    bytes: int
    used_by: list[str]  # runs that stay and have a path into it in their configuration


def kept(index: Index, rules: Sequence[str]) -> set[str]:
    """Return the folders that rules keep: `best=N` and `last=N` of each name, `tagged`, `where=SQL`. Raises ConfigError: another rule."""
    folders = set[str]()
    for rule in rules:
        kind, _, value = rule.partition("=")
        if kind in ("best", "last") and value.isdigit():
            counts = Counter[tuple[Any, ...]]()
            for row in index.rows(sort="best", where="best IS NOT NULL") if kind == "best" else index.rows():
                group = (row["name"], row["metric"] if kind == "best" else None)
                counts[group] += 1
                folders |= {row["folder"]} if counts[group] <= int(value) else set()
        elif rule == "tagged" or (kind == "where" and value):
            folders |= {row["folder"] for row in index.rows(where=value or "tags != ''")}
        else:
            raise ConfigError(happened=f"--keep={rule}", expected="best=N, last=N, tagged or where=SQL", fix="--keep=best=2 --keep=tagged")
    return folders


def removals(
    index: Index, rows: Iterable[dict[str, Any]], keep: set[str], *, only_checkpoints: bool, may_go_on: Callable[[RunFolder], bool]
) -> list[Removal]:
    """Return what can be removed of some rows: of none that is kept, or that a process or an engine works on.

    `may_go_on` tells the latter, as far as it is known.
    """
    chosen = {index.root / row["folder"]: row for row in rows if row["folder"] not in keep}
    sweep_of = {run: index.root / row["sweep"] if row["sweep"] else None for run, row in chosen.items()}
    busy = {sweep for sweep in sweep_of.values() if sweep is not None and folder_lock.is_held(sweep)}
    free = [run for run in chosen if sweep_of[run] not in busy and not may_go_on(RunFolder(run))]
    users, found = _users(index, set(free)), []
    for run in free:
        path = run / "checkpoints" if only_checkpoints else run
        if size := size_of(str(path)):
            found.append(Removal(run=run, path=path, sweep=sweep_of[run], bytes=size, used_by=users.get(run, [])))
    return found


def _users(index: Index, runs: set[Path]) -> dict[Path, list[str]]:
    """Return the runs that stay and have a path into one of `runs`, by that one."""
    users: dict[Path, list[str]] = {}
    for row in index.rows(where=_POINTS_ELSEWHERE) if runs else ():
        if (root := index.root / row["folder"]) not in runs:
            run = ArchivedRun(root)
            values = {value for _, value in leaves(run.config) if isinstance(value, str) and os.sep in value}
            starts = {str(run.environment.get("working_directory", "")), os.getcwd()}  # all may have moved since the run began
            paths = {Path(os.path.normpath(os.path.join(start, value))) for start in starts for value in values}
            for pointed in runs.intersection(paths.union(*(path.parents for path in paths))):
                users.setdefault(pointed, []).append(row["folder"])
    return users


def carry_out(index: Index, found: Sequence[Removal]) -> list[str]:
    """Remove it, each run while its folder is held; a sweep forgets the jobs that are gone. Return what could not be removed, and why."""
    failed = []
    for removal in found:
        try:
            folder_lock.hold(removal.run, key="RUN")  # a command that starts it just now is refused, or this one is
            remove(removal.path)
        except (ConfigError, OSError) as error:
            failed.append(f"{removal.run}: {error.happened if isinstance(error, ConfigError) else error.strerror}")
        finally:
            folder_lock.release()
    for root in {removal.sweep for removal in found if removal.sweep is not None and removal.path == removal.run}:
        with suppress(ConfigError, OSError):
            sweep = Sweep.load(root)
            sweep.jobs = [job for job in sweep.jobs if sweep.run_folder(job).root.exists()]
            sweep.save() if sweep.jobs else remove(root)
    return failed
