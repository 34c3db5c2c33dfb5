"""Curves and tables as text."""

from __future__ import annotations

from ddp_train.cli.drawing import aligned, number, plot


def test_columns_are_aligned_and_cut_to_the_terminal() -> None:
    rows = [["run", "steps"], ["a\x1b[31m", "5"], ["一二", "100"]]
    assert aligned(rows, right=[1]) == ["run        steps", "a\\x1b[31m      5", "一二         100"]
    assert aligned(rows, right=[1], width=8) == ["run    …", "a\\x1b[3…", "一二         100"[:7] + "…"]
    assert aligned([]) == []


def test_curves_are_drawn_by_letter() -> None:
    lines = plot({"A": [(0, 0.0), (10, 1.0)], "B": [(0, 1.0), (5, None), (10, 1.0)]})
    assert lines[0] == f"        1 │{'B' * 64}" and lines[7].startswith("        0 │AAA")
    assert lines[-1].split() == ["0", "step", "10"]
    assert plot({"A": []}) == [] and plot({"A": [(1, None)]}) == []
    assert plot({"A": [(40, 0.5)]})[-1].split() == ["40", "step", "40"]


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 3, 0.123456, "x", True)] == ["", "3", "0.1235", "x", "True"]
    assert number(0.5, "+") == "+0.5"
