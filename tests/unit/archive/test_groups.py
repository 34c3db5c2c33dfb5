"""Groups of runs that differ by the seed alone; expected quantiles are of scipy.stats.t.ppf(0.975, freedom)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.archive.groups import conclusion, difference, grouped, left_out, spread_of, t_quantile
from ddp_train.archive.index import Index
from ddp_train.run_folder.result import Status
from tests.unit.archive.finished import finished


def test_seeds_are_one_group_and_the_best_one_is_certain_or_not(tmp_path: Path) -> None:
    for seed in range(3):
        finished(tmp_path / f"low{seed}", 0.5 + seed / 100, "optimizer.lr=0.01", f"seed={seed}", "name=x")
        finished(tmp_path / f"high{seed}", 0.7 + seed / 100, "optimizer.lr=0.1", f"seed={seed}", f"cluster.grace_s={10 + seed}")
    finished(tmp_path / "failed", 0.99, "optimizer.lr=0.1", status=Status.FAILED)
    groups = grouped(Index(tmp_path).rows())
    assert [(group.typed, group.spread.n, group.folders[0]) for group in groups] == [
        ("optimizer.lr=0.1", 3, "high2"),
        ("optimizer.lr=0.01", 3, "low2"),
    ]
    assert groups[0].settings == {"optimizer.lr": 0.1} and groups[0].as_dict()["spread"]["n"] == 3
    assert conclusion(groups).startswith("the best is better than the next by 0.2 ± 0.023 (95% confidence): certain")
    finished(tmp_path / "one", 0.72, "optimizer.lr=0.3")
    groups = grouped(Index(tmp_path).rows())
    assert "not certain: one run says nothing of the spread" in conclusion(groups)
    for seed in range(2):
        finished(tmp_path / f"wide{seed}", 0.6 + 0.3 * seed, "optimizer.lr=0.4", f"seed={seed}")
    assert "not certain with 2 runs and 1 run" not in conclusion(grouped(Index(tmp_path).rows(where="optimizer.lr IN (0.1, 0.4)")))
    assert "not certain with 2 runs and 3 runs" in conclusion(grouped(Index(tmp_path).rows(where="optimizer.lr IN (0.1, 0.4)")))
    assert conclusion(groups[:1]) == ""


def test_the_same_run_again_and_one_that_was_cut_off_are_no_samples(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.5, "seed=1")
    finished(tmp_path / "again", 0.5, "seed=1", "cluster.grace_s=20", started=9)
    finished(tmp_path / "cut", 0.1, "seed=2", "debug.max_steps=3")
    rows = Index(tmp_path).rows()
    groups = grouped([*rows, *rows])  # of `runs outputs outputs/a`
    assert [(group.folders, group.spread.n, group.spread.half_width) for group in groups] == [(["again"], 1, None), (["cut"], 1, None)]
    assert groups[1].settings == {"debug.max_steps": 3} and groups[1].typed == "debug.max_steps=3"
    assert left_out(rows, groups) == "left out: 1 with the settings and the seed of a newer one"


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    for seed, value in enumerate((0.5, 0.6, float("inf"), float("nan"))):
        finished(tmp_path / str(seed), value, f"seed={seed}")
    rows = Index(tmp_path).rows()
    [group] = grouped(rows)
    assert group.spread.n == 2 and left_out(rows, [group]) == "left out: 2 without a finite value of the metric"
    assert left_out([row for row in rows if row["last"] in (0.5, 0.6)], [group]) == ""


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047), (1.3, 7.5005293), (2, 4.3026527), (5, 2.5705818), (30, 2.0422725), (1000, 1.9623391), (1e5, 1.9599877)],
)
def test_students_quantile_is_that_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-6)


def test_the_mean_has_its_interval() -> None:
    spread = spread_of([1.0, 2.0, 3.0])
    assert (spread.n, spread.mean, spread.deviation) == (3, 2.0, 1.0)
    assert spread.half_width == pytest.approx(4.3026527 / 3**0.5)
    assert spread_of([1.0]).half_width is None


def test_the_difference_of_two_means_has_welchs_interval() -> None:
    margin, half_width = difference(spread_of([1.0, 2.0, 3.0]), spread_of([5.0, 5.5, 6.0, 6.5]))
    assert margin == -3.75
    assert half_width == pytest.approx(2.0211636)  # scipy.stats.ttest_ind(..., equal_var=False).confidence_interval()
    assert difference(spread_of([1.0]), spread_of([2.0, 3.0])) == (-1.5, None)
    assert difference(spread_of([1.0, 1.0]), spread_of([2.0, 2.0])) == (-1.0, 0.0)
