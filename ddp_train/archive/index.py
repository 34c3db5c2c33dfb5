"""The runs below a folder, as rows: an index in FOLDER/.index.sqlite, which may be deleted at any time and is never believed unseen.

Every command looks at the files of all runs (which there are, their sizes and times) and reads those runs again that have changed. Whether
a run is worked in is asked of its lock. Where no index can be written it is kept in memory: a read-only folder, a full disk.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ddp_train.archive.archived_run import BAD_FILE, BROKEN, ArchivedRun, live_status, size_of, sweep_statuses
from ddp_train.config.spelling import nearest
from ddp_train.config.tree import identity, leaves
from ddp_train.errors import ConfigError, join_few
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS
from ddp_train.system.folder_lock import HOLDER

FILE = ".index.sqlite"
LIVE = ("status", "age_days")
STORED = (  # docs/runs.md says what each one is
    *("folder", "sweep", "name", "metric", "goal", "best", "best_step", "last", "steps", "hosts", "ranks", "size", "seconds", "started"),
    *("tags", "note", "typed", "problem", "recorded", "settings"),
)
_VERSION = zlib.crc32(repr(("2", STORED)).encode()) >> 1  # another one is read anew; the number is for columns that mean something else
_FILES = ("config.yaml", "result.json", "environment.json", "notes.json", "metrics.jsonl")  # those that are read
_FOLDERS = ("checkpoints", "evaluations", "predictions", "export", "profile")  # those that may grow when the run has ended
_BEGUN = {".hydra", "environment.json", "result.json", "logs", "launch", "metrics.jsonl", "failure.json"}  # a run's folder has one of them
_WORD = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|[A-Za-z_]\w*(?:[./][\w-]+)*""")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SILENT = "it ended without writing result.json"  # the problem of a run that was killed
_SAVE_EVERY = 1000  # runs that were read
_SHOWN = ("folder", "status", "metric", "best", "last", "steps", "tags")  # in a notebook
_MAX_ROWS, _MAX_CURVES = 50, 6


class _Found(NamedTuple):
    """A run folder as the file system shows it."""

    path: str
    sweep: str
    names: frozenset[str]
    stamp: str  # changes with what is in the folder


class Index:
    """The runs below a folder. `on_read(done, all)` is called for runs that have to be read. ConfigError: there is no such folder."""

    def __init__(self, root: Path, on_read: Callable[[int, int], None] = lambda done, all: None) -> None:
        if not root.is_dir():
            raise ConfigError(happened=f"there is no folder {root}", expected="a folder with runs", fix="ddp-train runs FOLDER")
        self.root, self.typed = root.absolute(), root
        self._database = _open(self.root / FILE)
        self._found, self._on_read = {os.path.relpath(run.path, self.root): run for run in find(self.root)}, on_read
        self._unless_damaged(self._update)

    def _unless_damaged(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns; where a part of the index turns out damaged, after it was made anew."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and not re.search("malformed|decode", str(error)):
                raise
            self._database.close()
            with suppress(OSError):
                os.unlink(self.root / FILE)
            self._database = _open(":memory:" if (self.root / FILE).exists() else self.root / FILE)
            self._update()
            return act()

    def rows(self, *, where: str = "", sort: str = "") -> list[dict[str, Any]]:
        """Return the runs as rows, the newest first; each has the columns, and `values`: its configuration and its metrics as JSON.

        Args:
            where: SQL over the columns, keys of the configuration and names of metrics.
            sort: one of these; `best` and `last` have the better run first; `-` before it reverses.

        Raises ConfigError: where or sort cannot be understood.
        """
        return [row for _, row in self.sorted_rows(where=where, sort=sort)]

    def sorted_rows(self, *, where: str, sort: str) -> list[tuple[Any, dict[str, Any]]]:
        """Return the rows, each after the value that it is sorted by."""
        key, down = sort.removeprefix("-"), "DESC" if sort.startswith("-") else ""

        def rows() -> list[tuple[Any, dict[str, Any]]]:
            by = f"CASE goal WHEN 'max' THEN -{key} ELSE {key} END" if key in ("best", "last") else self._sql(key, "--sort") or "NULL"
            condition, order = self._sql(where, "--where") or "1", f"({by}) IS NULL, ({by}) {down}, started DESC, folder"
            found = self._database.execute(f"SELECT {by}, * FROM listed WHERE ({condition}) ORDER BY {order}")
            return [(_read(value), dict(zip((*LIVE, *STORED, "values"), map(_read, row), strict=True))) for value, *row in found]

        try:
            found: list[tuple[Any, dict[str, Any]]] = self._unless_damaged(rows)
            return found
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise self._refusal(str(error), "--where" if where else "--sort", str(error).rpartition(": ")[2]) from None

    def _sql(self, text: str, option: str) -> str:
        """Return a text with keys of the configuration and names of metrics as SQL."""

        def word(match: re.Match[str]) -> str:
            name = match[0].strip('"')
            path = f"""'$."{name.replace("'", "''")}"'"""
            if match[0].startswith("'") or name in LIVE or name in STORED:
                return match[0]
            if self._database.execute(f'SELECT 1 FROM runs WHERE json_type("values", {path}) IS NOT NULL LIMIT 1').fetchall():
                return f'json_extract("values", {path})'
            if "/" in name and {*name.split("/")}.intersection(STORED):  # a division
                return "/".join(_WORD.sub(word, part) for part in name.split("/"))
            if "." in name or "/" in name:
                raise self._refusal(f"no run has {name}", option, name)
            return match[0]

        return _WORD.sub(word, text)

    def _refusal(self, happened: str, option: str, name: str) -> ConfigError:
        known = [row[0] for row in self._database.execute('SELECT DISTINCT key FROM runs, json_each("values") ORDER BY key')]
        columns = [name for name in (*LIVE, *STORED) if name not in ("recorded", "settings")]
        expected = f"SQL over {', '.join(columns)}; keys of the configuration and metrics: {join_few(known, 6)}"
        return ConfigError(happened=f"{option}: {happened}", expected=expected, fix=nearest(name, [*columns, *known]) or "")

    def _update(self) -> None:
        """Read the runs that are new or have changed, forget those that are gone, and ask for the status of all."""
        found = self._found
        stamps = {_read(folder): _read(stamp) for folder, stamp in self._database.execute("SELECT folder, stamp FROM runs")}
        changed = [folder for folder, run in found.items() if stamps.get(folder) != run.stamp]
        rows: list[list[Any]] = []
        for done, folder in enumerate(changed, 1):
            run = found[folder]
            facts = _facts(run) | {"folder": folder, "sweep": os.path.relpath(run.sweep, self.root) if run.sweep else ""}
            rows.append([_plain(run.stamp), facts["values"], *(_plain(facts.get(name)) for name in STORED)])
            self._on_read(done, len(changed))
            if len(rows) == _SAVE_EVERY:
                self._save(rows, [])
                rows = []
        self._save(rows, [(_plain(folder),) for folder in stamps.keys() - found.keys()])
        recorded = {_read(folder): status for folder, status in self._database.execute("SELECT folder, recorded FROM runs")}
        sweeps = {sweep: sweep_statuses(Path(sweep)) for sweep in {run.sweep for run in found.values() if run.sweep}}
        live = [(_plain(folder), _live(run, recorded.get(folder, BROKEN), sweeps)) for folder, run in found.items()]
        self._database.executescript("DROP VIEW IF EXISTS listed; DROP TABLE IF EXISTS live")  # of an update that found the index damaged
        self._database.execute("CREATE TEMP TABLE live (folder PRIMARY KEY, status TEXT)")
        with self._database:  # an open transaction would keep other commands out
            self._database.executemany("INSERT INTO live VALUES (?, ?)", live)
        age = f"round(({time.time()} - started) / 86400, 5)"
        ended = f"CASE WHEN problem = '{_SILENT}' AND status != '{Status.INTERRUPTED}' THEN '' ELSE problem END"
        columns = ", ".join(f"{ended} AS problem" if name == "problem" else name for name in STORED)
        view = f'SELECT status, {age} AS age_days, {columns}, "values" FROM live JOIN runs USING (folder)'
        self._database.execute(f"CREATE TEMP VIEW listed AS {view}")

    def _save(self, rows: list[list[Any]], gone: list[tuple[Any]]) -> None:
        """Write rows, and go on in memory where the index cannot be written: read-only, locked for long by another command, a full disk."""
        try:
            with self._database:
                self._database.executemany(f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * (2 + len(STORED)))})", rows)
                self._database.executemany("DELETE FROM runs WHERE folder = ?", gone)
        except sqlite3.OperationalError:
            disk, self._database = self._database, _open(":memory:")
            with suppress(sqlite3.Error):
                disk.backup(self._database)
            disk.close()
            self._save(rows, gone)


class RunRow(dict[str, Any]):
    """A run as a row: its columns, its configuration and its metrics by name. It is the run, too: `row.metrics`, `row.compare(other)`."""

    def __init__(self, columns: dict[str, Any], root: Path) -> None:
        super().__init__(columns)
        self.run = ArchivedRun(root)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copying and pickling, before there is a run
            raise AttributeError(name)
        return getattr(self.run, name)

    def _repr_html_(self) -> str:
        return self.run._repr_html_()


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
    found = merged([Index(Path(folder)) for folder in folders or ("outputs",)], where=where, sort=sort)[: limit or None]
    return Runs(RunRow({**json.loads(row.pop("values")), **row}, index.root / row["folder"]) for index, row in found)


def merged(indices: Sequence[Index], *, where: str, sort: str) -> list[tuple[Index, dict[str, Any]]]:
    """Return the rows of several indices in one order, each run once."""
    found = [(value, index, row) for index in indices for value, row in index.sorted_rows(where=where, sort=sort)]
    if len(indices) > 1:
        once = dict[str, tuple[Any, Index, dict[str, Any]]]()
        for entry in found:
            once.setdefault(os.path.realpath(entry[1].root / entry[2]["folder"]), entry)
        found = sorted(once.values(), key=lambda entry: -(entry[2]["started"] or -math.inf))
        found.sort(key=lambda entry: (isinstance(entry[0], str), entry[0] or 0), reverse=sort.startswith("-"))  # as SQL sorts
        found.sort(key=lambda entry: entry[0] is None)
    return [(index, row) for _, index, row in found]


def _open(file: Path | str) -> sqlite3.Connection:
    """Open an index, a new one in the place of one that is damaged or of another version; in memory where that cannot be."""
    try:
        database = sqlite3.connect(file)
        database.execute("PRAGMA temp_store = MEMORY")
        if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            with database:
                database.execute("DROP TABLE IF EXISTS runs")
                others = ", ".join(name for name in STORED if name != "folder")
                database.execute(f'CREATE TABLE runs (stamp TEXT, "values" TEXT, folder TEXT PRIMARY KEY, {others}) WITHOUT ROWID')
                database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute("SELECT folder, stamp FROM runs LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        return _open(":memory:")
    except sqlite3.DatabaseError:  # damaged
        with suppress(OSError):
            os.unlink(file)
            return _open(file)
        return _open(":memory:")
    return database


def find(root: Path) -> Iterator[_Found]:
    """Yield every run folder below a folder, itself included; a link is followed once, and to other places alone."""
    above = next(map(str, filter(is_sweep, root.parents)), "")  # of a job of a sweep that was asked for alone
    waiting, known = [(str(root), above)], {os.path.realpath(root)}
    while waiting:
        path, sweep = waiting.pop()
        try:
            entries = {entry.name: entry for entry in os.scandir(path)}
        except OSError:
            continue
        names = frozenset(entries)
        if ("config.yaml" in names and names & _BEGUN) or {"environment.json", "logs"} <= names:
            yield _Found(path, sweep, names, _stamp(entries))
            continue
        sweep = path if "sweep.json" in names else sweep
        for name, entry in entries.items():
            if name.startswith(".") or not entry.is_dir():
                continue
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if any(f"{target}/".startswith(f"{place}/") or f"{place}/".startswith(f"{target}/") for place in known):
                    continue
                known.add(target)
            waiting.append((entry.path, sweep))


def _stamp(entries: dict[str, os.DirEntry[str]]) -> str:
    parts = sorted(name for name in entries if name[0] != ".")
    for name in (*_FILES, *_FOLDERS):
        with suppress(KeyError, OSError):
            status = entries[name].stat()
            parts.append(f"{name} {status.st_mtime_ns} {status.st_size}")
    return ",".join(parts)


def _live(run: _Found, recorded: str, sweeps: dict[str, dict[Path, str]]) -> str:
    in_sweep = sweeps[run.sweep].get(Path(run.path)) if run.sweep else None
    if in_sweep is None and HOLDER not in run.names and "result.json" in run.names:  # most runs: no process works there
        return recorded
    return live_status(RunFolder(Path(run.path)), recorded, in_sweep=in_sweep)


def _facts(found: _Found) -> dict[str, Any]:
    """Return the row of a run but for its place."""
    try:
        facts = _facts_of(ArchivedRun(Path(found.path)))
    except BAD_FILE as error:  # JSON of another form than a run's
        why = f"its files are not those of a run of this version ({type(error).__name__}: {error})"
        facts = {"recorded": BROKEN, "problem": why, "values": "{}"}
    return facts | {"size": size_of(found.path)}


def _facts_of(run: ArchivedRun) -> dict[str, Any]:
    metric, environment, status, flat = run.headline["metric"], run.environment, run.recorded_status, dict(leaves(run.config))
    best, ended_silently = run.best.get(metric) or {}, status == Status.INTERRUPTED and run.result is None
    return {
        "name": run.config.get("name"),
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
        "typed": shlex.join(run.overrides),
        "problem": "; ".join(run.problems) or (_SILENT if ended_silently else ""),
        "recorded": status,
        "settings": identity({key: value for key, value in flat.items() if key.rpartition(".")[2] not in REPEATS}),
        "values": _as_json({**flat, **run.last}),
    }


def _as_json(values: dict[str, Any]) -> str:
    """Return values as JSON that SQL reads: it has no .inf and no .nan."""
    try:
        return json.dumps(values, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(values, default=str), parse_constant=lambda _: None))


def _plain(value: Any) -> Any:
    """Return what a column holds: JSON of another form than a run's may have anything in its place; bytes for what is no UTF-8."""
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    text = str(value)
    return text if text.isascii() or not _SURROGATE.search(text) else text.encode(errors="surrogatepass")


def _read(value: Any) -> Any:
    """Return what `_plain` was given."""
    return value.decode(errors="surrogatepass") if isinstance(value, bytes) else value
