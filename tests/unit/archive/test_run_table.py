"""`ddp_train.runs`: runs as rows for Python and notebooks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

import ddp_train
from ddp_train.errors import ConfigError
from tests.unit.archive.finished import a_sweep


def test_rows_are_dicts_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_sweep(tmp_path / "outputs/s", "0.1", "0.2")
    monkeypatch.chdir(tmp_path)
    runs = ddp_train.runs(sort="best")
    assert isinstance(runs, list) and all(isinstance(row, dict) for row in runs)  # what pandas and polars take
    best, other = runs
    assert (best["folder"], best["best"], best["optimizer.lr"], best["eval/accuracy"]) == ("s/1", 0.6, 0.2, 0.6)
    assert best.keys() == other.keys()
    assert best.config["optimizer"]["lr"] == 0.2 and best.metrics[0] == {"split": "train", "step": 10, "loss": 10.0}
    assert [item.values for item in best.compare(other.run).differences["config"]] == [[0.2, 0.1]]
    assert [row["folder"] for row in ddp_train.runs("outputs", "outputs/s", where="optimizer.lr > 0.15")] == ["s/1", "1"]
    assert copy.copy(best) == best
    with pytest.raises(ConfigError, match="there is no folder nowhere"):
        ddp_train.runs("nowhere")


def test_a_notebook_shows_them_without_a_script(tmp_path: Path) -> None:
    a_sweep(tmp_path, "0.1", "0.2")
    runs = ddp_train.runs(tmp_path)
    table, run = runs._repr_html_(), runs[0]._repr_html_()
    assert table.count("<tr>") == 3 and "<td>0.6</td>" in table and table.count("<polyline") == 2
    assert run.count("<svg") == 2 and "completed, step 100" in run and "optimizer.lr=0.2" in run
    assert "script" not in table + run
    assert ddp_train.runs(tmp_path, where="best > 1")._repr_html_().count("<tr>") == 1
