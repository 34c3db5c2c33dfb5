"""csv/train.csv and csv/eval.csv: a table for each split, for a spreadsheet or pandas. Made from metrics.jsonl, and as exact."""

import csv
import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_train.metrics.jsonl import FILE
from ddp_train.system.files import json_lines, write_atomic


class Csv:
    """Writes the tables in the run folder's `csv/` after each evaluation, and when the run ends.

    A table has a column for every value that a record of its split has.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)

    def write(self, record: Mapping[str, Any]) -> None:
        if record["split"] != "train":
            with suppress(OSError):
                self.close()

    def close(self) -> None:
        tables: dict[str, list[dict[str, Any]]] = {}
        for record in json_lines(self._run_dir / FILE):
            tables.setdefault(record.pop("split"), []).append(record)
        for split, records in tables.items():
            text = io.StringIO()
            writer = csv.DictWriter(text, dict.fromkeys(name for record in records for name in record), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
            write_atomic(self._run_dir / "csv" / f"{split}.csv", text.getvalue())
