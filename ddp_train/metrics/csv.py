"""csv/train.csv and csv/eval.csv: a table for each split, for a spreadsheet or pandas; consistent over a resume."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_train.metrics.growing_file import GrowingFile
from ddp_train.system.files import write_atomic


class Csv:
    """Writes every record as one row of its split's table, in the run folder's `csv/`.

    The first record of a split names the columns. When a later one has a value more, the table gets one column more.

    Args:
        run_dir: the run folder.
        step: the step that this attempt begins at; rows after it are from an attempt that got further than its last checkpoint, and go.
    """

    def __init__(self, run_dir: str, step: int = 0) -> None:
        self._folder = Path(run_dir) / "csv"
        self._folder.mkdir(exist_ok=True)
        self._tables = {path.stem: _Table(path, step=step) for path in sorted(self._folder.glob("*.csv"))}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, at once or as soon as there is space again."""
        split = str(record["split"])
        if split not in self._tables:
            self._tables[split] = _Table(self._folder / f"{split}.csv")
        self._tables[split].append({name: value for name, value in record.items() if name != "split"})

    def close(self) -> None:
        """Close the files.

        Raises:
            OSError: rows are waiting, and there is no space for them still.
        """
        for table in self._tables.values():
            table.close()


class _Table:
    """One file with a header.

    Args:
        step: rows after it go; 0: all.
    """

    def __init__(self, path: Path, *, step: int = 0) -> None:
        self._path = path
        self._columns = next(csv.reader(path.read_text().splitlines()), []) if path.exists() else []
        if "step" not in self._columns:  # a kill left the header half written
            self._columns = []
        self._file = GrowingFile(path, keeps=lambda line: self._keeps(line, step))

    def append(self, row: Mapping[str, Any]) -> None:
        if not self._columns:
            self._columns = [*row]
            self._file.append(_line(self._columns))
        if new := [name for name in row if name not in self._columns]:
            with suppress(OSError):  # a full disk, which the file itself tells: the next row tries again
                self._widen(new)
        self._file.append(_line("" if row.get(name) is None else row[name] for name in self._columns))

    def close(self) -> None:
        self._file.close()

    def _keeps(self, line: str, step: int) -> bool:
        cells = next(csv.reader([line]), [])
        if not self._columns or len(cells) != len(self._columns):
            return False  # half written
        at = cells[self._columns.index("step")]
        return cells == self._columns or (at.isdigit() and int(at) <= step)

    def _widen(self, names: list[str]) -> None:
        """Add columns, which are empty in the rows that there are."""
        self._file.close()
        header, *rows = csv.reader(self._path.read_text().splitlines())
        table = [[*header, *names], *([*row, *("" for _ in names)] for row in rows)]
        write_atomic(self._path, "".join(f"{_line(row)}\n" for row in table))
        self._columns = [*header, *names]
        self._file = GrowingFile(self._path, keeps=lambda line: True)


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
