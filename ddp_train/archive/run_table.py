"""`ddp_train.runs`: the runs below a folder, for Python and notebooks."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.drawing import svg
from ddp_train.archive.index import Index
from ddp_train.errors import ConfigError

_SHOWN = ("folder", "status", "metric", "best", "last", "steps", "tags")
_MOST_ROWS, _MOST_CURVES = 50, 6


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
        rows = "".join(f"<tr>{''.join(f'<td>{escape(_short(row[name]))}</td>' for name in _SHOWN)}</tr>" for row in self[:_MOST_ROWS])
        more = f"<p>and {len(self) - _MOST_ROWS:,} more</p>" if len(self) > _MOST_ROWS else ""
        metric = self[0]["metric"] if self else ""
        curves = {row["folder"]: row.curve(metric) for row in self[:_MOST_CURVES] if row["metric"] == metric}
        head = "".join(f"<th>{name}</th>" for name in _SHOWN)
        return f"<table><tr>{head}</tr>{rows}</table>{more}{svg(curves, metric)}"


def runs(*folders: str | Path, where: str = "", sort: str = "", limit: int = 0) -> Runs:
    """Return the runs below folders (`outputs`, if none is given), the newest first.

    Args:
        where: SQL over the columns, keys of the configuration and metrics: "status = 'completed' AND optimizer.lr > 0.001".
        sort: one of these; `best` and `last` have the better run first; `-` before it reverses.
        limit: the largest number of rows; 0: all.
    """
    rows = Runs()
    for folder in folders or ("outputs",):
        index = Index(require_folder(Path(folder)))
        for row in index.rows(where=where, sort=sort, limit=limit):
            rows.append(RunRow({**json.loads(row.pop("values")), **row}, index.root / row["folder"]))
    return rows


def require_folder(path: Path) -> Path:
    """Return a folder. ConfigError: there is none."""
    if not path.is_dir():
        raise ConfigError(happened=f"there is no folder {path}", expected="a folder with runs", fix="ddp-train runs FOLDER")
    return path


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
