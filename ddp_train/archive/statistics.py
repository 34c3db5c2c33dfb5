"""Means of repeated runs, and how certain they and their differences are: Student's t, and Welch's for two groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The mean of some values, and how far they lie from it; None: a single value says nothing of that."""

    n: int
    mean: float
    deviation: float | None  # standard deviation of the sample
    half_width: float | None  # the true mean lies within mean ± this with `CONFIDENCE`


def spread_of(values: Sequence[float]) -> Spread:
    """Return the mean and the spread of one or more values."""
    n, deviation = len(values), stdev(values) if len(values) > 1 else None
    half_width = None if deviation is None else t_quantile(n - 1) * deviation / math.sqrt(n)
    return Spread(n=n, mean=fmean(values), deviation=deviation, half_width=half_width)


def difference(left: Spread, right: Spread) -> tuple[float, float | None]:
    """Return left - right of two means, and its half width with `CONFIDENCE`; None: one of them is a single value."""
    if left.deviation is None or right.deviation is None:
        return left.mean - right.mean, None
    a, b = left.deviation**2 / left.n, right.deviation**2 / right.n
    freedom = (a + b) ** 2 / (a**2 / (left.n - 1) + b**2 / (right.n - 1)) if a + b > 0 else 1.0  # Welch and Satterthwaite
    return left.mean - right.mean, t_quantile(freedom) * math.sqrt(a + b)


def t_quantile(freedom: float) -> float:
    """Return the value that Student's |t| exceeds with probability 1 - `CONFIDENCE`.

    With t = sqrt(freedom) tan(angle) the density is a cosine's power, which Simpson's rule integrates; Newton's method finds the angle.
    """
    scale, steps = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi), 200
    angle = math.atan(2 / math.sqrt(freedom))
    for _ in range(30):
        inner = sum((4 if i % 2 else 2) * math.cos(angle * i / steps) ** (freedom - 1) for i in range(1, steps))
        end = math.cos(angle) ** (freedom - 1)
        move = (scale * angle / (3 * steps) * (1 + inner + end) - CONFIDENCE / 2) / (scale * end)
        angle = min(max(angle - move, angle / 2), (angle + math.pi / 2) / 2)
    return math.sqrt(freedom) * math.tan(angle)
