"""The runs below some folders as rows, which SQL selects and sorts.

FOLDER/.index.sqlite keeps what was read of a run under the stamp of its folder: the names, sizes and times of what is in it. Every command
looks at all folders and reads those runs whose stamp is not kept, so that the file may be deleted at any time. It is replaced whole, never
changed; where it cannot be written the runs are read each time. The status of a run is kept as its files say it; its lock is asked anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from ddp_train.archive.archived_run import BAD_FILE, BROKEN, ArchivedRun, live_status, size_of, sweep_statuses
from ddp_train.config.spelling import nearest
from ddp_train.config.tree import identity, leaves
from ddp_train.errors import ConfigError, join_few
from ddp_train.run_folder.paths import SWEEP_FILE, RunFolder, is_sweep
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS
from ddp_train.system.files import appears_whole
from ddp_train.system.folder_lock import HOLDER

FILE = ".index.sqlite"
COLUMNS = (  # docs/runs.md says what each one is
    *("folder", "sweep", "name", "status", "age_days", "metric", "goal", "best", "best_step", "last", "steps", "hosts", "ranks", "size"),
    *("seconds", "started", "tags", "note", "reproduces", "typed", "problem", "error", "settings"),
)
_VERSION = "2"  # of what is kept: begins every stamp
_IN = RunFolder(Path())  # the names in any
_BEGUN = {path.name for path in (_IN.hydra, _IN.result, _IN.logs, _IN.launch, _IN.metrics, _IN.failure)}  # a run's folder has one of them
_WORD = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|[A-Za-z_]\w*(?:[./][\w-]+)*""")
_SHOWN = ("folder", "status", "metric", "best", "last", "steps", "tags")  # in a notebook
_MAX_ROWS, _MAX_CURVES = 50, 6
_MANY_RUNS = 200  # to read: a person at a terminal sees how far it is


class _Found(NamedTuple):
    """A run folder as the file system shows it."""

    path: str
    sweep: str
    names: frozenset[str]
    stamp: str


class Index:
    """The runs below some folders. ConfigError: there is no such folder."""

    def __init__(self, *roots: Path) -> None:
        columns = ", ".join(f"{name} AS (json_extract(facts, '$.{name}'))" for name in COLUMNS)
        self._database = sqlite3.connect(":memory:")
        self._database.execute(f"CREATE TABLE runs (facts, named, {columns})")
        self.roots, places = roots, {Path(os.path.realpath(root)): root for root in roots}
        for place, root in places.items():
            if not root.is_dir():
                raise ConfigError(happened=f"there is no folder {root}", expected="a folder with runs", fix="ddp-train runs FOLDER")
            if places.keys().isdisjoint(place.parents):  # else its runs are those of the folder above it
                self._database.executemany("INSERT INTO runs VALUES (?, ?)", _runs_below(root))

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM runs").fetchone()[0])

    def rows(self, *, where: str = "", sort: str = "", limit: int = 0) -> list[dict[str, Any]]:
        """Return runs as dicts of columns, keys and metrics; arguments as of `runs`. Raises ConfigError: where or sort is wrong."""
        key, down = sort.removeprefix("-"), "DESC" if sort.startswith("-") else ""
        by = f"CASE goal WHEN 'max' THEN -{key} ELSE {key} END" if key in ("best", "last") else self._sql(key, "--sort") or "NULL"
        condition, order = self._sql(where, "--where") or "1", f"({by}) IS NULL, ({by}) {down}, started DESC, folder"
        try:
            found = self._database.execute(f"SELECT facts, named FROM runs WHERE ({condition}) ORDER BY {order} LIMIT {limit or -1}")
            return [row_of(*read) for read in found]
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise self._refusal(str(error), "--where" if where else "--sort", str(error).rpartition(": ")[2]) from None

    def _sql(self, text: str, option: str) -> str:
        """Return a text with keys of the configuration and names of metrics as SQL."""

        def word(match: re.Match[str]) -> str:
            name = match[0].strip('"')
            if match[0].startswith("'") or name in COLUMNS:
                return match[0]
            arguments = f"""named, '$."{name.replace("'", "''")}"'"""
            if self._database.execute(f"SELECT 1 FROM runs WHERE json_type({arguments}) IS NOT NULL LIMIT 1").fetchone():
                return f"json_extract({arguments})"
            if "." in name or "/" in name:
                raise self._refusal(f"no run has {name}", option, name)
            return match[0]

        return _WORD.sub(word, text)

    def _refusal(self, happened: str, option: str, name: str) -> ConfigError:
        known = [row[0] for row in self._database.execute("SELECT DISTINCT key FROM runs, json_each(named) ORDER BY key")]
        expected = f"SQL over {', '.join(COLUMNS)}; keys of the configuration and metrics: {join_few(known, 6)}"
        return ConfigError(happened=f"{option}: {happened}", expected=expected, fix=nearest(name, [*COLUMNS, *known]) or "")


class RunRow(dict[str, Any], ArchivedRun):
    """A run as a row: its columns, its configuration and its metrics by name. It is the run, too: `row.metrics`, `row.compare(other)`."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        ArchivedRun.__init__(self, Path(self["folder"]))


class Runs(list[RunRow]):
    """Runs as rows: a list of dicts, which `pandas.DataFrame` and `polars.DataFrame` take. A notebook shows it as a table with curves."""

    def _repr_html_(self) -> str:
        from ddp_train.archive.report.figures import figure_of

        shown = [[row[name] for name in _SHOWN] for row in self[:_MAX_ROWS]]
        texts = [["" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in shown]
        lines = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in [_SHOWN, *texts])
        more = f"<p>and {len(self) - _MAX_ROWS:,} more</p>" if len(self) > _MAX_ROWS else ""
        metric = self[0]["metric"] if self else ""
        curves = {row["folder"]: [row.curve(metric)] for row in self[:_MAX_CURVES] if row["metric"] == metric}
        return f"<table>{lines}</table>{more}{figure_of(metric, curves)}"


def runs(*folders: str | Path, where: str = "", sort: str = "", limit: int = 0) -> Runs:
    """Return the runs below folders (`outputs`, if none is given), the newest first.

    Args:
        where: SQL over the columns, keys of the configuration and metrics: "status = 'completed' AND optimizer.lr > 0.001".
        sort: one of these; `best` and `last` have the better run first; `-` before it reverses.
        limit: the largest number of rows; 0: all.
    """
    index = Index(*map(Path, folders or ("outputs",)))
    return Runs(map(RunRow, index.rows(where=where, sort=sort, limit=limit)))


def _runs_below(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the columns, and the keys with the metrics, of each run below a folder as JSON; keep what had to be read."""
    found = {run.stamp: run for run in find(root)}
    kept = _load(root / FILE)
    gone, new = kept.keys() - found.keys(), found.keys() - kept.keys()
    console = Console(stderr=True)
    is_quiet = len(new) < _MANY_RUNS or not console.is_terminal
    try:
        for stamp in track(new, "reading runs", console=console, transient=True, disable=is_quiet):
            kept[stamp] = read(ArchivedRun(Path(found[stamp].path)))
    finally:  # what an interrupted command has read is not read again
        if gone or new:
            _save(root / FILE, {stamp: read for stamp, read in kept.items() if stamp in found})
    sweeps = {sweep: sweep_statuses(Path(sweep)) for sweep in {run.sweep for run in found.values()} if sweep}
    now = time.time()
    for stamp, run in found.items():
        facts, named = json.loads(kept[stamp][0]), kept[stamp][1]
        in_sweep = sweeps[run.sweep].get(Path(run.path)) if run.sweep else None
        if in_sweep is not None or HOLDER in run.names or _IN.result.name not in run.names:  # in most folders no process works
            facts["status"] = live_status(RunFolder(Path(run.path)), facts["status"], in_sweep=in_sweep)
        if facts["status"] == Status.INTERRUPTED and _IN.result.name not in run.names:
            facts["problem"] = "it ended without writing result.json"
        age_days = None if facts["started"] is None else round((now - facts["started"]) / 86400, 5)
        facts |= {"folder": run.path, "sweep": run.sweep, "age_days": age_days}
        yield json.dumps(facts), named


def _load(file: Path) -> dict[str, tuple[str, str]]:
    """Return the content of an index file: stamp -> what `read` has found; {}: there is none, or a damaged one."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{file.absolute().as_uri()}?immutable=1", uri=True)) as database:
        return {stamp: (facts, named) for stamp, facts, named in database.execute("SELECT stamp, facts, named FROM runs")}
    return {}


def _save(file: Path, kept: Mapping[str, tuple[str, str]]) -> None:
    rows = ((stamp, *read) for stamp, read in kept.items())
    with (
        suppress(OSError, sqlite3.Error),
        appears_whole(file, nonce=uuid.uuid4().hex) as new,
        closing(sqlite3.connect(new)) as database,
        database,
    ):
        database.execute("CREATE TABLE runs (stamp, facts, named)")
        database.executemany("INSERT INTO runs VALUES (?, ?, ?)", rows)


def find(root: Path) -> Iterator[_Found]:
    """Yield every run folder below a folder, itself included; of links, those to folders that are not seen without them."""
    above = next(map(str, filter(is_sweep, root.absolute().parents)), "")  # of a job of a sweep that was asked for alone
    waiting, seen = [(str(root), above)], set[tuple[int, int]]()
    while waiting:
        path, sweep = waiting.pop()
        try:
            status, entries = os.stat(path), {entry.name: entry for entry in os.scandir(path)}
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        names = frozenset(entries)
        if names & {_IN.config.name, _IN.environment.name} and names & _BEGUN:
            yield _Found(path, sweep, names, _stamp(path.removeprefix(str(root)), entries))
            continue
        sweep = path if SWEEP_FILE in names else sweep
        for name, entry in entries.items():
            if not name.startswith(".") and entry.is_dir():
                waiting.insert(0 if entry.is_symlink() else len(waiting), (entry.path, sweep))


def _stamp(folder: str, entries: Mapping[str, os.DirEntry[str]]) -> str:
    """Return a text that changes with the content of a run folder."""
    parts = [_VERSION, folder]
    for name in sorted(entries):
        with suppress(OSError):  # a link to nothing, or removed just now
            status = entries[name].stat()
            parts.append(f"{name} {status.st_mtime_ns} {status.st_size}")
    return ascii(parts)


def row_of(facts: str, named: str) -> dict[str, Any]:
    """Return the result of `read` as a row."""
    columns: dict[str, Any] = json.loads(facts)
    return {**columns, **json.loads(named), **columns}


def read(run: ArchivedRun) -> tuple[str, str]:
    """Return the columns of a run that its files tell, and the keys of its configuration with its metrics, as JSON."""
    facts, named = {**dict.fromkeys(COLUMNS), "folder": str(run.root), "size": size_of(run.root)}, dict[str, Any]()
    try:
        facts |= _facts(run)
        named = {**dict(leaves(run.config)), **run.last}
    except BAD_FILE as error:  # JSON of another form than a run's
        why = f"its files are not those of a run of this version ({type(error).__name__}: {error})"
        facts |= {"status": BROKEN, "problem": why}
    return _as_json(facts), _as_json(named)


def _facts(run: ArchivedRun) -> dict[str, Any]:
    metric, environment = run.headline["metric"], run.environment
    best = run.best.get(metric) or {}
    return {
        "name": run.config.get("name"),
        "status": run.recorded_status,
        **run.headline,
        "best": best.get("value"),
        "best_step": best.get("step"),
        "last": run.last.get(metric),
        "steps": run.step,
        "hosts": len(environment["hosts"]) if "hosts" in environment else None,
        "ranks": environment.get("world_size"),
        "seconds": run.result.seconds if run.result is not None else None,
        "started": run.started,
        "tags": " ".join(map(str, run.notes.get("tags", []))),
        "note": run.notes.get("note"),
        "reproduces": run.reproduces,
        "typed": shlex.join(run.overrides),
        "problem": "; ".join(run.problems),
        "error": run.result.error if run.result is not None else None,
        "settings": identity({key: value for key, value in leaves(run.config) if key.rpartition(".")[2] not in REPEATS}),
    }


def _as_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON that SQL reads: it has no Infinity and no NaN."""
    return json.dumps(json.loads(json.dumps(values, default=str), parse_constant=lambda name: None))
