"""Curves and tables as text, for the terminal, and curves as static SVG, for notebooks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from rich.cells import cell_len

from ddp_train.errors import printable

Curve = Sequence[tuple[float, float | None]]
"""Values by step; None: one that was not finite."""

ANSI = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[34m", "\x1b[31m")
_COLOURS = ("#3274b5", "#d1742a", "#8a4fa3", "#3a8f4d", "#b03a48", "#6b6f76")
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a cell of Unicode's braille, by column, from below
_MOST_POINTS = 600


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int = 0) -> list[str]:
    """Return rows as lines with aligned columns, those of numbers to the `right`; lines are cut after `width` cells, if that is given."""
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    sizes = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        spaces = [" " * (size - cell_len(cell)) for size, cell in zip(sizes, row, strict=True)]
        padded = [space + cell if i in right else cell + space for i, (cell, space) in enumerate(zip(row, spaces, strict=True))]
        line = "  ".join(padded).rstrip()
        lines.append(line if not width or cell_len(line) <= width else f"{line[: width - 1]}…")
    return lines


def number(value: Any, sign: str = "") -> str:
    """Write a value for people: a float with four digits, nothing for None."""
    return "" if value is None else f"{value:{sign}.4g}" if isinstance(value, float) else str(value)


def plot(curves: Mapping[str, Curve], *, width: int = 64, height: int = 8, has_colours: bool = False) -> list[str]:
    """Draw curves into one frame of text lines. Without colours each is drawn by its own letter, the first one of its name."""
    points = {name: _finite(curve) for name, curve in curves.items()}
    if not any(points.values()):
        return []
    left, right, low, high = _bounds(points.values())
    across, up = (2 * width - 1) / (right - left or 1), (4 * height - 1) / (high - low or 1)  # dots for each step and unit
    cells: dict[tuple[int, int], tuple[str, int]] = {}
    for index, (name, curve) in enumerate(points.items()):
        for x, y in _dots([((x - left) * across, (y - low) * up) for x, y in curve]):
            place = (x // 2, height - 1 - y // 4)
            dots = cells.get(place, ("", 0))[1] | _DOTS[x % 2][y % 4]
            cells[place] = (f"{ANSI[index % len(ANSI)]}{chr(0x2800 + dots)}\x1b[0m" if has_colours else name[:1], dots)
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    drawn = ("".join(cells.get((column, row), (" ", 0))[0] for column in range(width)) for row in range(height))
    lines = [f"{labels.get(row, ''):>9} │{text.rstrip()}" for row, text in enumerate(drawn)]
    return [*lines, f"{'':>9} └{'─' * width}", f"{'':>11}{left:<{width // 2}g}{f'step {right:g}':>{width - width // 2}}"]


def svg(curves: Mapping[str, Curve], title: str, *, width: int = 420, height: int = 180) -> str:
    """Return curves as a static SVG: no script, which an untrusted notebook would not run."""
    points = {name: _finite(curve) for name, curve in curves.items()}
    if not any(points.values()):
        return ""
    left, right, low, high = _bounds(points.values())
    across, down = (width - 64) / (right - left or 1), (height - 48) / (high - low or 1)
    drawn = ""
    for index, (name, curve) in enumerate(points.items()):
        places = " ".join(f"{56 + (x - left) * across:.1f},{24 + (high - y) * down:.1f}" for x, y in _thinned(curve))
        stroke = f'fill="none" stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.5"'
        drawn += f'<polyline {stroke} points="{places}"><title>{escape(name)}</title></polyline>'
    below = height - 8
    for x, y, anchor, text in (
        *((56, 14, "start", title), (52, 30, "end", f"{high:.4g}"), (52, height - 24, "end", f"{low:.4g}")),
        *((56, below, "start", f"{left:g}"), (width - 8, below, "end", f"step {right:g}")),
    ):
        drawn += f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
    frame = f'<path d="M56 24V{height - 24}H{width - 8}" fill="none" stroke="#888"/>'
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="11" fill="#888"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{frame}{drawn}</svg>'


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in curve if y is not None and math.isfinite(y)]


def _bounds(curves: Collection[list[tuple[float, float]]]) -> tuple[float, float, float, float]:
    """Return the smallest and the largest step and value of curves."""
    xs, ys = ([point[axis] for curve in curves for point in curve] for axis in (0, 1))
    return min(xs), max(xs), min(ys), max(ys)


def _dots(points: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """Return the dots of a line through points."""
    dots = [(round(x), round(y)) for x, y in points[:1]]
    for (x, y), (next_x, next_y) in pairwise(points):
        steps = max(1, round(max(abs(next_x - x), abs(next_y - y))))
        dots += [(round(x + (next_x - x) * i / steps), round(y + (next_y - y) * i / steps)) for i in range(1, steps + 1)]
    return dots


def _thinned(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return some points of a long curve: of each part its lowest and its highest one, so that no spike is lost."""
    size = max(1, 2 * len(curve) // _MOST_POINTS)
    parts = (sorted(curve[start : start + size], key=lambda point: point[1]) for start in range(0, len(curve), size))
    return [point for part in parts for point in sorted({part[0], part[-1]})] if size > 2 else curve
