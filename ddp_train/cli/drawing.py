"""Curves and tables as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.cells import cell_len

from ddp_train.errors import printable

_WIDTH, _HEIGHT = 64, 8  # characters of a curve's frame


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


def plot(curves: Mapping[str, Sequence[tuple[int, float | None]]]) -> list[str]:
    """Draw values by step into one frame of text lines, each curve by its letter; None is left out."""
    points = {letter: [(x, y) for x, y in curve if y is not None] for letter, curve in curves.items()}
    xs, ys = ([point[axis] for curve in points.values() for point in curve] for axis in (0, 1))
    if not xs:
        return []
    across, up = (_WIDTH - 1) / (max(xs) - min(xs) or 1), (_HEIGHT - 1) / (max(ys) - min(ys) or 1)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for letter, curve in points.items():
        places = [((x - min(xs)) * across, (max(ys) - y) * up) for x, y in curve]
        for (x, y), (next_x, next_y) in pairwise([*places, places[-1]] if places else []):
            steps = max(1, round(max(abs(next_x - x), abs(next_y - y))))
            for i in range(steps):
                rows[round(y + (next_y - y) * i / steps)][round(x + (next_x - x) * i / steps)] = letter
    labels = {0: f"{max(ys):.4g}", _HEIGHT - 1: f"{min(ys):.4g}"}
    lines = [f"{labels.get(i, ''):>9} │{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    return [*lines, f"{'':>9} └{'─' * _WIDTH}", f"{'':>11}{min(xs):<{_WIDTH // 2}}{f'step {max(xs)}':>{_WIDTH // 2}}"]
