"""Curves as SVG for a paper: one file for each metric; runs that differ by their seed alone are one line with a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from ddp_train.archive.groups import t_quantile
from ddp_train.archive.report.curves import Floats, thin
from ddp_train.archive.report.page import Shown
from ddp_train.run_folder.sweep import REPEATS
from ddp_train.system.files import write_atomic

_HUES = ("#1f6fb4", "#d1621b", "#1a9270", "#b8528f", "#58a9d8", "#9a7d0a", "#6f5bb5", "#6b7280")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 440, 280, 62, 14, 14, 44
_MAX_POINTS = 600

Curve = Sequence[tuple[int, float | None]]
"""Values by step; None: one that was not finite."""

Line = tuple[Floats, Floats, Floats]
"""Steps, means, and half their 95 % intervals, 0 for one run."""


def write_figures(shown: Sequence[Shown], folder: Path) -> list[Path]:
    """Write a figure of each metric over steps into a folder; return the files."""
    members: dict[int, list[Shown]] = {}
    for each in shown:
        members.setdefault(each.group, []).append(each)
    groups: dict[str, list[Shown]] = {}
    for runs in members.values():
        words = [(key.rpartition(".")[2], value) for key, value in runs[0].values.items()]
        name = ", ".join(f"{word}={value}" for word, value in words if word not in REPEATS) or runs[0].name
        groups[f"{name} ({runs[0].name})" if name in groups else name] = runs
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for metric in dict.fromkeys(name for each in shown for name in each.run.last):
        if drawn := figure_of(metric, {name: [each.run.curve(metric) for each in runs] for name, runs in groups.items()}):
            files.append(folder / f"{metric.replace('/', '_')}.svg")
            write_atomic(files[-1], drawn)
    return files


def figure_of(metric: str, groups: Mapping[str, Sequence[Curve]]) -> str:
    """Return the curves of some groups of runs as SVG, which needs no script; "": none has two values."""
    lines = {name: line for name, curves in groups.items() if (line := _mean(curves)) is not None}
    return _figure(metric, lines) if lines else ""


def _mean(curves: Sequence[Curve]) -> Line | None:
    """Return the mean of some runs at the steps of the longest, of those that have come so far; None: it has no value.

    Where one of them has NaN, the mean is NaN.
    """
    tables = [np.array(curve, dtype=np.float64) for curve in curves if len(curve) > 1]
    if not tables:
        return None
    steps = max(tables, key=len)[:, 0]
    is_there = np.array([(steps >= table[0, 0]) & (steps <= table[-1, 0]) for table in tables])
    values = np.where(is_there, [np.interp(steps, table[:, 0], table[:, 1]) for table in tables], 0.0)
    count = is_there.sum(0)
    mean = values.sum(0) / count
    deviation = np.sqrt(np.where(is_there, (values - mean) ** 2, 0.0).sum(0) / np.maximum(count - 1, 1))
    quantiles = np.array([0.0, 0.0, *(t_quantile(n - 1) for n in range(2, len(tables) + 1))])
    return None if np.isnan(mean).all() else (steps, mean, quantiles[count] * deviation / np.sqrt(count))


def _figure(metric: str, lines: dict[str, Line]) -> str:
    left, right = min(steps[0] for steps, _, _ in lines.values()), max(steps[-1] for steps, _, _ in lines.values())
    low, high = min(np.nanmin(mean) for _, mean, _ in lines.values()), max(np.nanmax(mean) for _, mean, _ in lines.values())
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    right = right if right > left else left + 1

    def places(steps: Floats, values: Floats) -> str:
        x = _LEFT + (steps - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - np.clip(values, low, high)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))

    drawn = []
    for x in _ticks(left, right):
        at = _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        drawn.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>')
    for y in _ticks(low, high):
        at = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        drawn.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for number, (name, (steps, mean, half)) in enumerate(lines.items()):
        hue = _HUES[number % len(_HUES)]
        kept = thin(mean, _MAX_POINTS)
        parts = np.split(kept, np.flatnonzero(np.isnan(mean[kept])))  # a NaN breaks the line
        for part in (part[~np.isnan(mean[part])] for part in parts):
            if half[part].any():
                around = places(np.r_[steps[part], steps[part][::-1]], np.r_[(mean + half)[part], (mean - half)[part][::-1]])
                drawn.append(f'<path d="M{around}Z" fill="{hue}" fill-opacity="0.15"/>')
            if len(part):
                drawn.append(f'<path d="M{places(steps[part], mean[part])}" fill="none" stroke="{hue}" stroke-width="1.5"/>')
        drawn.append(f'<text x="{_LEFT + 14}" y="{_HEIGHT + 16 * number + 4}">{escape(name)}</text>')
        drawn.append(f'<path d="M{_LEFT - 6} {_HEIGHT + 16 * number}h14" stroke="{hue}" stroke-width="2"/>')
    drawn.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">step</text>')
    drawn.append(f'<text transform="translate(12 {(_HEIGHT - _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(metric)}</text>')
    height = _HEIGHT + 16 * len(lines)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return f'{head} font-family="sans-serif" font-size="11" fill="currentColor">{"".join(drawn)}</svg>\n'


def _ticks(low: float, high: float) -> Floats:
    power = 10.0 ** np.floor(np.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4)
    return np.asarray(np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step, dtype=np.float64)
