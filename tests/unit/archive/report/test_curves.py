from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.curves import columns_of, curves_of, knots, marks_of, thin
from tests.unit.archive.report.run_files import write_run

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")))
CURVES, LONG = (st.lists(VALUES, min_size=least, max_size=400).map(np.array) for least in (1, 101))


@given(CURVES, st.integers(10, 120))
def test_thinning_loses_no_spike_and_no_nan(values: np.ndarray, most: int) -> None:
    kept = thin(values, most)
    assert list(kept) == sorted(set(kept)) and kept[0] == 0 and kept[-1] == len(values) - 1
    assert len(kept) <= most
    finite = values[~np.isnan(values)]
    if len(finite):
        assert np.nanmin(values[kept]) == finite.min() and np.nanmax(values[kept]) == finite.max()
    for left, right in pairwise(kept):  # between two points that a line joins there is no NaN
        assert np.isnan(values[[left, right]]).any() or not np.isnan(values[left:right]).any()


@given(LONG, st.integers(40, 90))
def test_each_part_of_a_thinned_curve_keeps_its_extremes(values: np.ndarray, most: int) -> None:
    kept, is_nan = thin(values, most), np.isnan(values).any()
    size = -(-len(values) // ((most - 4) // 6 if is_nan else (most - 2) // 2))
    for begin in range(0, len(values), size):
        part = values[begin : begin + size]
        if not np.isnan(part).all():
            within = values[kept[(kept >= begin) & (kept < begin + size)]]
            assert (np.nanmin(within), np.nanmax(within)) == (np.nanmin(part), np.nanmax(part))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200).map(np.cumsum))
def test_a_column_follows_from_its_knots(column: np.ndarray) -> None:
    points = np.array(knots(column.astype(float), 0.4))
    assert np.abs(np.interp(np.arange(len(column)), points[:, 0], points[:, 1]) - column).max() <= 0.4


def test_columns_have_the_records_that_know_them_and_nan_for_null() -> None:
    columns = columns_of(
        [{"split": "train", "step": 1, "loss": 1.0}, {"step": 2, "loss": None, "new": 3}, {"step": 3, "loss": 2.0, "text": "a"}]
    )
    assert {name: rows.tolist() for name, (rows, _) in columns.items()} == {"step": [0, 1, 2], "loss": [0, 1, 2], "new": [1]}
    np.testing.assert_array_equal(columns["loss"][1], [1.0, np.nan, 2.0])


def test_a_run_s_curves_and_marks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", nans=(5,))
    (run / "failure.1.json").write_text(json.dumps({"rank": 1, "pid": 1, "step": 7, "error": "Killed", "message": "by a test"}))
    read = curves_of(run, points=10_000)
    loss = read["curves"]["train/loss"]
    assert (loss["n"], loss["nan"], len(loss["y"])) == (60, 1, 60) and np.isnan(loss["y"][4])
    assert read["axes"]["train"]["step"] == [[0, 1.0], [59, 60.0]] and read["axes"]["eval"]["samples"] == [[0, 320.0], [5, 1920.0]]
    assert [(mark["kind"], mark["step"]) for mark in marks_of(ArchivedRun(run))] == [("spike", 20), ("failure", 7)]
