"""Which runs, or which of their checkpoints, can be removed, why the others stay, and removing them."""

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
    stays: str  # why it is not removed; "": it can be


def kept(index: Index, rules: Sequence[str]) -> dict[str, str]:
    """Return the rule that keeps each folder: `best=N`, `last=N` of each name, `tagged`, `where=SQL`. Raises ConfigError: another one."""
    rule_of = dict[str, str]()
    for rule in rules:
        kind, _, value = rule.partition("=")
        if kind in ("best", "last") and value.isdigit():
            groups = defaultdict[Any, list[str]](list)
            for row in index.rows(sort="best", where="best IS NOT NULL AND reproduces IS NULL") if kind == "best" else index.rows():
                groups[row["name"], row["metric"] if kind == "best" else ""].append(row["folder"])
            folders = [folder for group in groups.values() for folder in group[: int(value)]]
        elif rule == "tagged" or (kind == "where" and value):
            folders = [row["folder"] for row in index.rows(where=value or "tags != ''")]
        else:
            raise ConfigError(happened=f"--keep={rule}", expected="best=N, last=N, tagged or where=SQL", fix="--keep=best=2 --keep=tagged")
        rule_of |= dict.fromkeys(folders, f"--keep={rule}")
    return rule_of


def removals(index: Index, *, where: str, rules: Sequence[str], only_checkpoints: bool) -> list[Removal]:
    """Return what an index's runs, or their checkpoints, are as removals, also of those that stay."""
    keep, found, rows = kept(index, rules), [], {Path(row["folder"]): row for row in index.rows(where=where)}
    stays = {
        run: keep.get(row["folder"])
        or (f"it is {row['status']}" if row["status"] in (Status.QUEUED, Status.RUNNING) else "")
        or ("its sweep is running" if row["sweep"] and folder_lock.is_locked(Path(row["sweep"])) else "")
        or ("" if _is_run_alone(run, index.roots) else "you are in it, or it holds more than a run")
        for run, row in rows.items()
    }
    stays |= _users([run for run, why in stays.items() if not why], index)
    for run, row in rows.items():
        path, sweep = RunFolder(run).checkpoints if only_checkpoints else run, Path(row["sweep"]) if row["sweep"] else None
        if size := size_of(path):
            found.append(Removal(run=run, path=path, sweep=sweep, bytes=size, stays=stays[run]))
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


def _users(runs: Iterable[Path], index: Index) -> dict[Path, str]:
    """Name for each of `runs` another run of the index that stays and has a path into it in its configuration."""
    resolved, used_by = cache(os.path.realpath), dict[Path, str]()
    real = {Path(resolved(run)): run for run in runs}
    for row in index.rows():
        if Path(resolved(row["folder"])) in real:
            continue
        lists = [value if isinstance(value, list) else [value] for key, value in row.items() if key not in COLUMNS]
        texts = {text for values in lists for text in values if isinstance(text, str) and text.isprintable()}
        for place in (Path(resolved(text)) for text in texts):
            used_by |= {real[path]: f"{os.path.relpath(row['folder'])} uses it" for path in {place, *place.parents} & real.keys()}
    return used_by


def carry_out(found: Sequence[Removal]) -> list[str]:
    """Remove what was found, each run while its folder and its sweep's are locked; return the runs that could not be removed, and why."""
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
