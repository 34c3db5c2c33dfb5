from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.curves import curves_of, marks_of, thin, time_split_of
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.times import read_times
from tests.unit.archive.report.run_files import write_lines, write_run

quick = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])  # on busy cores, too
VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")))
CURVES, LONG = (st.lists(VALUES, min_size=least, max_size=400).map(np.array) for least in (1, 101))


@quick
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


@quick
@given(LONG, st.integers(40, 90))
def test_each_part_of_a_thinned_curve_keeps_its_extremes(values: np.ndarray, most: int) -> None:
    kept, is_nan = thin(values, most), np.isnan(values).any()
    size = -(-len(values) // ((most - 4) // 6 if is_nan else (most - 2) // 2))
    for begin in range(0, len(values), size):
        part = values[begin : begin + size]
        if not np.isnan(part).all():
            within = values[kept[(kept >= begin) & (kept < begin + size)]]
            assert (np.nanmin(within), np.nanmax(within)) == (np.nanmin(part), np.nanmax(part))


def test_curves_have_the_records_that_know_them_and_nan_for_null(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "new": 3}, {"step": 4, "loss": 2.0, "text": "a"}]
    write_lines(tmp_path / "metrics.jsonl", [{"split": "train", **row} for row in rows])
    read = curves_of(ArchivedRun(tmp_path), points=10_000)
    assert {name: (curve["steps"].tolist(), curve["n"]) for name, curve in read["curves"].items()} == {
        "train/loss": ([1, 1, 2], 3),
        "train/new": ([2], 1),
    }
    np.testing.assert_array_equal(read["curves"]["train/loss"]["y"], [1.0, np.nan, 2.0])
    assert list(read["axes"]["train"]) == ["step"]


def test_a_long_run_s_axes_are_short_and_end_with_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3000)
    axes = curves_of(ArchivedRun(run), points=10_000)["axes"]["train"]
    assert {len(values) for values in axes.values()} == {400}
    assert {name: (values[0], values[-1]) for name, values in axes.items()} == {
        "step": (1, 3000),
        "samples": (32, 96_000),
        "epoch": (0.05, 150),
        "time": (0, 2999),
    }


def test_a_mark_of_a_slow_rank_says_which_one_where_and_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    event = {
        "kind": "slow_rank",
        "step": 30,
        "rank": 1,
        "host": "b",
        "cause": "compute",
        "ratio": 1.5,
        "text": "rank 1 on b by its compute",
    }
    write_lines(run / "events.jsonl", [event])
    assert marks_of(ArchivedRun(run), []) == [{"kind": "slow_rank", "step": 30, "text": "rank 1 on b by its compute"}]


def test_a_run_s_curves_and_marks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", nans=(5,))
    (run / "failure.1.json").write_text(
        json.dumps({"kind": "rank", "rank": 1, "pid": 1, "step": 7, "error": "Killed", "message": "by test"})
    )
    read = curves_of(ArchivedRun(run), points=10_000)
    loss = read["curves"]["train/loss"]
    assert (loss["n"], len(loss["y"])) == (60, 60) and np.flatnonzero(np.isnan(loss["y"])).tolist() == [4]
    assert read["axes"]["eval"]["samples"].tolist() == list(range(320, 1921, 320))
    assert [(mark["kind"], mark["step"]) for mark in marks_of(ArchivedRun(run), [])] == [("spike", 20), ("failure", 7)]


@pytest.mark.parametrize("cells", [160, 100_000])
def test_the_parts_sum_to_the_same_however_they_are_thinned(tmp_path: Path, cells: int) -> None:
    found = time_split_of(read_times(RunFolder(write_run(tmp_path / "run"))), cells=cells)
    assert found is not None
    seconds = found["seconds"]
    assert seconds.shape[1:] == (2, 8) and len(seconds) == len(found["steps"]) == min(60, max(8, cells // 16)) and found["steps"][-1] == 60
    assert seconds.sum(0)[:, 1] == pytest.approx([60 * 0.2, 60 * 0.2 + 30 * 0.1]) and sum(found["taken"]) == 60
    assert found["not_split"] == {"communication": "gloo"} and found["hosts"] == ["a", "b"]


def test_a_run_of_an_older_version_has_no_split(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "times.jsonl").unlink()
    assert time_split_of(read_times(RunFolder(run)), cells=100) is None
