"""csv/: one table per split, consistent over a resume, wider when a value is new."""

from __future__ import annotations

import csv
from pathlib import Path

from ddp_train.metrics.csv import Csv
from tests.unit.metrics.records import record


def table(folder: Path, split: str) -> list[dict[str, str]]:
    with (folder / f"csv/{split}.csv").open() as file:
        return [*csv.DictReader(file)]


def test_each_split_is_a_table(tmp_path: Path) -> None:
    writer = Csv(str(tmp_path))
    writer.write(record(1, loss=0.5))
    writer.write(record(1, "eval", accuracy=0.25))
    writer.close()
    assert [(row["step"], row["loss"]) for row in table(tmp_path, "train")] == [("1", "0.5")]
    assert [*table(tmp_path, "eval")[0]] == ["step", "epoch", "samples", "time", "accuracy"]


def test_a_resumed_run_has_no_step_twice_also_where_a_kill_cut_a_row(tmp_path: Path) -> None:
    first = Csv(str(tmp_path))
    for step in range(1, 8):
        first.write(record(step, loss=1.0))
        first.write(record(step, "eval", accuracy=1.0))
    first.close()
    with (tmp_path / "csv/train.csv").open("a") as file:
        file.write("8,0.8")
    second = Csv(str(tmp_path), step=5)
    assert [row["step"] for row in table(tmp_path, "eval")] == ["1", "2", "3", "4", "5"]  # at once, whatever is written later
    for step in range(6, 9):
        second.write(record(step, loss=2.0))
    second.close()
    assert [(row["step"], row["loss"]) for row in table(tmp_path, "train")] == [
        (str(step), "1.0" if step <= 5 else "2.0") for step in range(1, 9)
    ]


def test_a_value_that_is_new_becomes_a_column(tmp_path: Path) -> None:
    writer = Csv(str(tmp_path))
    writer.write(record(1, loss=0.5))
    writer.write(record(2, loss=0.4, skipped_steps=3))
    writer.write(record(3, loss=0.3))
    writer.close()
    assert [row["skipped_steps"] for row in table(tmp_path, "train")] == ["", "3", ""]
