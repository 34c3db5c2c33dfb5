"""Means and their certainty; the expected numbers are of scipy.stats.t.ppf(0.975, freedom)."""

from __future__ import annotations

import pytest

from ddp_train.archive.statistics import difference, spread_of, t_quantile


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
