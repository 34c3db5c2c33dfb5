"""csv/: one table per split, as exact as metrics.jsonl, with a column for every value."""

from __future__ import annotations

import csv
from pathlib import Path

from ddp_train.metrics.csv import Csv
from ddp_train.metrics.jsonl import JsonLines
from tests.unit.metrics.records import record


def table(folder: Path, split: str) -> list[dict[str, str]]:
    with (folder / f"csv/{split}.csv").open() as file:
        return [*csv.DictReader(file)]


def test_each_split_is_a_table_that_is_there_after_an_evaluation(tmp_path: Path) -> None:
    jsonl, writer = JsonLines(str(tmp_path)), Csv(str(tmp_path))
    for each in (record(1, loss=0.5), record(1, "eval", accuracy=0.25), record(2, loss=0.4, skipped_steps=3)):
        jsonl.write(each)
        writer.write(each)
    assert [(row["step"], row["loss"]) for row in table(tmp_path, "train")] == [("1", "0.5")]
    assert [*table(tmp_path, "eval")[0]] == ["step", "epoch", "samples", "time", "accuracy"]
    jsonl.close()
    writer.close()
    assert [(row["loss"], row["skipped_steps"]) for row in table(tmp_path, "train")] == [("0.5", ""), ("0.4", "3")]


def test_a_resumed_run_has_no_step_twice_also_where_a_kill_cut_a_line(tmp_path: Path) -> None:
    for first, last in ((0, 7), (5, 8)):
        jsonl, writer = JsonLines(str(tmp_path), step=first), Csv(str(tmp_path))
        for step in range(first + 1, last + 1):
            jsonl.write(record(step, loss=float(first)))
        jsonl.close()
        writer.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"split": "train", "st')
    assert [(row["step"], row["loss"]) for row in table(tmp_path, "train")] == [
        (str(step), "0.0" if step <= 5 else "5.0") for step in range(1, 9)
    ]


def test_a_run_without_records_has_no_table(tmp_path: Path) -> None:
    Csv(str(tmp_path)).close()
    assert not (tmp_path / "csv").exists()
