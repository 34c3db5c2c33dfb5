"""Which runs, or which of their checkpoints, can be removed, and removing them: those that no rule keeps and no process works on."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun, size_of
from ddp_train.archive.index import Index, find
from ddp_train.config.schema import SECTIONS
from ddp_train.errors import ConfigError, UserError
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep
from ddp_train.system import folder_lock
from ddp_train.system.files import remove

_OF_SWEEP = ("sweep.csv", "multirun.yaml", "conf", "compiled", "launch", folder_lock.HOLDER, "sweep.json")
_WORD = re.compile(r"""[^\s'",\[\]{}]+""")  # of a configuration that cannot be read


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
    indices: Sequence[Index],
    index: Index,
    rows: Iterable[dict[str, Any]],
    keep: set[str],
    *,
    only_checkpoints: bool,
    may_go_on: Callable[[RunFolder], bool],
) -> list[Removal]:
    """Return what can be removed of some rows of `index`: of none that is kept, that is not surely a run, or that something works on.

    `indices`: where runs may lie that use it. `may_go_on` tells whether a process or an engine works on a run, as far as it is known.
    """
    chosen = {index.root / row["folder"]: row for row in rows if row["folder"] not in keep}
    sweep_of = {run: index.root / row["sweep"] if row["sweep"] else None for run, row in chosen.items()}
    busy = {sweep for sweep in sweep_of.values() if sweep is not None and folder_lock.is_held(sweep)}
    free = [run for run in chosen if sweep_of[run] not in busy and _is_run_alone(run, index.root) and not _is_busy(run, may_go_on)]
    users, found = _users([*(index.root for index in indices), index.root], index.root, free), []
    for run in free:
        path = run / "checkpoints" if only_checkpoints else run
        if size := size_of(str(path)):
            found.append(Removal(run=run, path=path, sweep=sweep_of[run], bytes=size, used_by=users.get(Path(os.path.realpath(run)), [])))
    return found


def _is_run_alone(root: Path, given: Path) -> bool:
    """Tell whether a folder is surely one run and nothing else: no project, no place where people stand, no folder of other runs."""
    run, place = ArchivedRun(root), root.resolve()
    if run.folder.run_id() is None and not all(section in run.config for section in SECTIONS):
        return False
    if any(folder.resolve().is_relative_to(place) for folder in (Path.cwd(), given)):
        return False
    for folder, names, files in os.walk(root):
        if {".git", "sweep.json"}.intersection([*names, *files]):
            return False
        if folder == str(root):
            names[:] = [name for name in names if name not in ("evaluations", "launch")]  # copies of code, and what has the form of a run
        elif "environment.json" in files:
            return False
    return True


def _is_busy(run: Path, may_go_on: Callable[[RunFolder], bool]) -> bool:
    """Tell whether a process or an engine works on a run or on one of its evaluations, or whether that is not known."""
    try:
        return any(may_go_on(RunFolder(root)) for root in (run, *run.glob("evaluations/*")))
    except (UserError, OSError, TypeError):  # a damaged file of a submission
        return True


def _users(places: Iterable[Path], root: Path, runs: Iterable[Path]) -> dict[Path, list[str]]:
    """Return the runs that stay and have a path into one of `runs`, by the real folder of that one; a run that is used stays, too."""
    real, users = {Path(os.path.realpath(run)) for run in runs}, dict[Path, list[str]]()
    around = {Path(os.path.realpath(folder)) for place in (*places, Path("outputs").absolute()) for folder in _around(place)}
    waiting = sorted({Path(os.path.realpath(run.path)) for place in around for run in find(place)} - real) if real else []
    while waiting:
        user = waiting.pop()
        for pointed in real & _pointed(user) - {user}:
            if pointed not in users:
                waiting.append(pointed)
            users.setdefault(pointed, []).append(os.path.relpath(user, os.path.realpath(root)))
    return {run: sorted(names) for run, names in users.items()}


def _around(place: Path) -> Iterator[Path]:
    """Yield a folder and where its runs' users may lie: in the `outputs` above it, or in its parent, but for a project's folder."""
    yield place
    outputs = [parent for parent in (place, *place.parents) if parent.name == "outputs"]
    if outputs or not (Path.cwd().is_relative_to(place.parent) or place.parent == place.parent.parent):
        yield (outputs or [place.parent])[-1]


def _pointed(root: Path) -> set[Path]:
    """Return the real folders to which paths in a run's configuration lead, and those above them."""
    run = ArchivedRun(root)
    texts = {text for text in _texts(run.config) if os.sep in text}
    texts.update(_texts([run.config.get(key) for key in ("init_from", "resume", "after")]))
    if not run.config:
        with suppress(OSError):
            texts = {text for text in _WORD.findall(run.folder.config.read_text(errors="replace")) if os.sep in text}
    starts = {str(run.environment.get("working_directory", "")), os.getcwd()}  # all may have moved since the run began
    paths = {Path(os.path.realpath(os.path.join(start, text))) for start in starts for text in texts if "\0" not in text}
    return paths.union(*(path.parents for path in paths))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a tree."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def carry_out(found: Sequence[Removal], *, may_go_on: Callable[[RunFolder], bool]) -> list[str]:
    """Remove it, each run while its folder and its sweep's are held; a sweep forgets the jobs that are gone.

    Return what could not be removed, and why.
    """
    failed = list[str]()
    for removal in found:
        with _released(removal.run, failed):
            if removal.sweep is not None:
                folder_lock.hold(removal.sweep, key="RUN")
            if _is_busy(removal.run, may_go_on):  # it began while a person was asked
                raise ConfigError(happened="another run is working in it")
            folder_lock.hold(removal.run, key="RUN")  # a command that starts it just now is refused, or this one is
            remove(removal.path)
    for root in {removal.sweep for removal in found if removal.sweep is not None and removal.path == removal.run}:
        with _released(root, failed):
            folder_lock.hold(root, key="RUN")
            _forget_jobs(root)
    return failed


@contextmanager
def _released(folder: Path, failed: list[str]) -> Iterator[None]:
    """Release the folders that a block holds, and add to `failed` why it could not do its work."""
    try:
        yield
    except (ConfigError, OSError) as error:
        failed.append(f"{folder}: {error.happened if isinstance(error, ConfigError) else error.strerror}")
    finally:
        folder_lock.release()


def _forget_jobs(root: Path) -> None:
    """Write a sweep without the jobs that are gone; without any, remove its own files, and its folder if there is nothing else in it."""
    with suppress(ConfigError):  # a damaged sweep.json
        sweep = Sweep.load(root)
        sweep.jobs = [job for job in sweep.jobs if sweep.run_folder(job).root.exists()]
        if sweep.jobs:
            sweep.save()
            return
        for name in _OF_SWEEP:
            remove(root / name)
        with suppress(OSError):
            root.rmdir()
