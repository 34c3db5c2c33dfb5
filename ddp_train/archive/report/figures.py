"""Curves as SVG for a paper: one file for each metric; runs that differ by their seed alone are one line with a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from ddp_train.archive.groups import t_quantile
from ddp_train.archive.report.curves import Floats, thin
from ddp_train.archive.report.page import Shown
from ddp_train.system.files import write_atomic

_HUES = ("#1f6fb4", "#d1621b", "#1a9270", "#b8528f", "#58a9d8", "#9a7d0a", "#6f5bb5", "#6b7280")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 62, 426, 20, 240  # of the figure, and the frame of its curves
_LINE = 16  # of text
_MAX_POINTS = 600

Curve = Sequence[tuple[int, float | None]]  # values by step; None: one that was not finite


def write_figures(shown: Sequence[Shown], folder: Path) -> list[Path]:
    """Write a figure of each metric over steps into a folder; return the files."""
    members = dict[int, list[Shown]]()
    for each in shown:
        members.setdefault(each.group, []).append(each)
    groups = {runs[0].label or runs[0].name: list(filter(attrgetter("counts"), runs)) or runs for runs in members.values()}
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for metric in dict.fromkeys(name for each in shown for name in each.run.last):
        if drawn := figure_of(metric, {name: [each.run.curve(metric) for each in runs] for name, runs in groups.items()}):
            files.append(folder / f"{metric.replace('/', '_')}.svg")
            write_atomic(files[-1], drawn)
    return files


def figure_of(metric: str, groups: Mapping[str, Sequence[Curve]]) -> str:
    """Return the curves of some groups of runs as SVG, which needs no script; "": none has two values."""
    lines = {name: line for name, curves in groups.items() if not np.isnan((line := _mean(curves))[1]).all()}
    if not lines:
        return ""
    left, right = min(steps[0] for steps, _, _ in lines.values()), max(steps[-1] for steps, _, _ in lines.values())
    low, high = min(np.nanmin(mean) for _, mean, _ in lines.values()), max(np.nanmax(mean) for _, mean, _ in lines.values())
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def across(steps: Any) -> Any:
        return _LEFT + (steps - left) / (right - left) * (_RIGHT - _LEFT)

    def down(values: Any) -> Any:
        return _TOP + (high - np.clip(values, low, high)) / (high - low) * (_BOTTOM - _TOP)

    drawn = [_text(across(x), _BOTTOM + _LINE, "middle", f"{x:,.0f}") for x in _ticks(left, right)]
    for y in _ticks(low, high):
        drawn.append(f'<path d="M{_LEFT} {down(y):.1f}H{_RIGHT}" stroke="#ddd"/>{_text(_LEFT - 6, down(y) + 4, "end", f"{y:.4g}")}')
    for number, (name, (steps, mean, half)) in enumerate(lines.items()):
        hue, kept = _HUES[number % len(_HUES)], thin(mean, _MAX_POINTS)
        parts = np.split(kept, np.flatnonzero(np.isnan(mean[kept])))  # a NaN breaks the line
        for rows in filter(len, (part[~np.isnan(mean[part])] for part in parts)):
            x, y, upper, lower = across(steps[rows]), down(mean[rows]), down((mean + half)[rows]), down((mean - half)[rows])
            if half[rows].any():
                band = _points(np.r_[x, x[::-1]], np.r_[upper, lower[::-1]])
                drawn.append(f'<polygon points="{band}" fill="{hue}" fill-opacity="0.15"/>')
            drawn.append(f'<polyline points="{_points(x, y)}" fill="none" stroke="{hue}" stroke-width="1.5"/>')
        drawn.append(_text(_LEFT, _BOTTOM + _LINE * (number + 3), "start", name, fill=hue))
    drawn += [_text((_LEFT + _RIGHT) / 2, _BOTTOM + 2 * _LINE, "middle", "step"), _text(_LEFT, _TOP - 8, "start", metric)]
    height = _BOTTOM + _LINE * (len(lines) + 3)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'{head} font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>\n'


def _mean(curves: Sequence[Curve]) -> tuple[Floats, Floats, Floats]:
    """Return steps, the mean of the runs that have come so far (NaN where one has NaN), and half its 95 % interval, 0 for one run."""
    tables = [np.array(curve, dtype=np.float64) for curve in curves if len(curve) > 1] or [np.full((2, 2), np.nan)]
    steps = max(tables, key=len)[:, 0]
    values = np.ma.masked_equal([np.interp(steps, table[:, 0], table[:, 1], left=np.inf, right=np.inf) for table in tables], np.inf)
    count, mean = values.count(0), values.mean(0)
    error = np.sqrt(((values - mean) ** 2).sum(0) / count / np.maximum(count - 1, 1))
    quantiles = np.array([0.0, 0.0, *(t_quantile(n - 1) for n in range(2, len(tables) + 1))])
    return steps, mean.filled(np.nan), quantiles[count] * error.filled(0.0)


def _text(x: float, y: float, anchor: str, text: str, *, fill: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _points(x: Floats, y: Floats) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _ticks(low: float, high: float) -> Floats:
    power = 10.0 ** np.floor(np.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4)
    return np.asarray(np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step, dtype=np.float64)
