"""Which runs, or which of their checkpoints, can be removed, and removing them: no rule keeps them, and nothing works on them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun, size_of
from ddp_train.archive.index import COLUMNS, FILE, Index
from ddp_train.config.schema import SECTIONS
from ddp_train.errors import ConfigError, UserError
from ddp_train.launch.submit import require_ended
from ddp_train.run_folder.paths import SWEEP_FILE, RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import Sweep
from ddp_train.system import folder_lock
from ddp_train.system.files import remove

_OF_SWEEP = ("sweep.csv", "multirun.yaml", "conf", "compiled", "launch", FILE, folder_lock.HOLDER, SWEEP_FILE)


@dataclass(frozen=True, kw_only=True)
class Removal:
    run: Path
    path: Path  # the run folder, or its checkpoints
    sweep: Path | None  # that the run is a job of
    bytes: int
    used_by: str  # a run that stays and has a path into this one in its configuration, so that this one stays, too; "": none


def kept(index: Index, rules: Sequence[str]) -> set[str]:
    """Return the folders that rules keep: `best=N` and `last=N` of each name, `tagged`, `where=SQL`. Raises ConfigError: another rule."""
    folders = set[str]()
    for rule in rules:
        kind, _, value = rule.partition("=")
        if kind in ("best", "last") and value.isdigit():
            groups = defaultdict[Any, list[str]](list)
            for row in index.rows(sort="best", where="best IS NOT NULL AND reproduces IS NULL") if kind == "best" else index.rows():
                groups[row["name"], row["metric"] if kind == "best" else ""].append(row["folder"])
            folders.update(*(group[: int(value)] for group in groups.values()))
        elif rule == "tagged" or (kind == "where" and value):
            folders.update(row["folder"] for row in index.rows(where=value or "tags != ''"))
        else:
            raise ConfigError(happened=f"--keep={rule}", expected="best=N, last=N, tagged or where=SQL", fix="--keep=best=2 --keep=tagged")
    return folders


def removals(index: Index, *, where: str, rules: Sequence[str], only_checkpoints: bool) -> list[Removal]:
    """Return the removable parts of an index's runs: of none that a rule keeps, that waits or runs, or that may be no run."""
    keep, found = kept(index, rules), []
    ended = [row for row in index.rows(where=where) if row["status"] not in (Status.QUEUED, Status.RUNNING)]
    rows = [row for row in ended if row["folder"] not in keep and not (row["sweep"] and folder_lock.is_locked(Path(row["sweep"])))]
    runs = {run: row for row in rows if _is_run_alone(run := Path(row["folder"]), index.roots)}
    users = _users(runs, index.roots)
    for run, row in runs.items():
        path, sweep = RunFolder(run).checkpoints if only_checkpoints else run, Path(row["sweep"]) if row["sweep"] else None
        if size := size_of(path):
            found.append(Removal(run=run, path=path, sweep=sweep, bytes=size, used_by=users.get(run, "")))
    return found


def _is_run_alone(root: Path, given: Iterable[Path]) -> bool:
    """Tell whether a folder is surely one run and nothing else: no project, no place where people stand, no folder of other runs."""
    run, place = ArchivedRun(root), root.resolve()
    is_run = run.folder.run_id() is not None or all(section in run.config for section in SECTIONS)
    is_around = any(folder.resolve().is_relative_to(place) for folder in (Path.cwd(), *given))
    begun = run.folder.environment.name
    marks = {path.relative_to(root).parts[0] for path in root.rglob("*") if path.name in (".git", SWEEP_FILE, begun)}
    with_copies = {run.folder.evaluations.name, run.folder.launch.name}  # of code, and small runs
    return is_run and not is_around and marks <= {begun, *with_copies}


def _users(runs: Iterable[Path], roots: Sequence[Path]) -> dict[Path, str]:
    """Return those of `runs` that a run which stays has a path into, in its configuration, each with that one; what is used stays, too."""
    real = {Path(os.path.realpath(run)): run for run in runs}
    above = [place for root in roots for place in (root.absolute(), *root.absolute().parents)]
    starts = [Path.cwd(), *above]  # paths are relative to one of them, also when all has moved
    outputs = [place for place in (*reversed(above), Path("outputs")) if place.name == "outputs" and place.is_dir()]

    @cache
    def runs_at(text: str) -> set[Path]:
        paths = [Path(os.path.realpath(start / text)) for start in starts if text.isprintable()]
        return {place for path in paths for place in (path, *path.parents)} & real.keys()

    uses, used_by = dict[Path, set[Path]](), dict[Path, Path]()
    for row in Index(*outputs[:1], *roots).rows():
        lists = [value if isinstance(value, list) else [value] for key, value in row.items() if key not in COLUMNS]
        texts = {text for values in lists for text in values if isinstance(text, str)}
        uses[Path(os.path.realpath(row["folder"]))] = {run for text in texts for run in runs_at(text)}
    staying = [run for run in uses if run not in real]
    for user in staying:  # it grows: what is used stays, too
        for used in uses[user] - used_by.keys():
            used_by[used] = user
            staying.append(used)
    return {real[run]: os.path.relpath(user) for run, user in used_by.items()}


def carry_out(found: Sequence[Removal]) -> list[str]:
    """Remove it, each run while its folder and its sweep's are locked; a sweep forgets the jobs that are gone.

    Return the paths that could not be removed, and why.
    """
    failed = list[str]()
    for removal in found:
        aside = removal.path.with_name(f"{removal.path.name}.removed")
        try:
            if removal.sweep is not None:
                folder_lock.lock(removal.sweep, key="RUN")
            require_ended(removal.run)
            folder_lock.lock(removal.run, key="RUN")  # a command that starts it just now is refused, or this one is
            removal.path.rename(aside)  # no evaluation begins in it from here on
            try:
                for evaluation in (*removal.run.glob("evaluations/*"), *aside.glob("evaluations/*")):
                    require_ended(evaluation)
                    folder_lock.lock(evaluation, key="RUN")
            except BaseException:
                aside.rename(removal.path)
                raise
            remove(aside)
            if removal.sweep is not None and removal.path == removal.run:
                _forget_jobs(removal.sweep)
        except (UserError, OSError, TypeError) as error:  # TypeError: a damaged file of a submission
            failed.append(f"{removal.run}: {error.happened if isinstance(error, UserError) else error}")
        finally:
            folder_lock.unlock_all()
    return failed


def _forget_jobs(root: Path) -> None:
    """Write a sweep without the jobs that are gone; without any, remove its own files, and its folder if there is nothing else in it."""
    sweep = Sweep.load(root)
    sweep.jobs = [job for job in sweep.jobs if sweep.run_folder(job).root.exists()]
    if sweep.jobs:
        sweep.save()
        return
    for name in _OF_SWEEP:
        remove(root / name)
    with suppress(OSError):
        root.rmdir()
