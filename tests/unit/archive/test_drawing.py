"""Curves and tables as text and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from ddp_train.archive.drawing import aligned, number, plot, svg


def test_columns_are_aligned_and_cut_to_the_terminal() -> None:
    rows = [["run", "steps"], ["a\x1b[31m", "5"], ["一二", "100"]]
    assert aligned(rows, right=[1]) == ["run        steps", "a\\x1b[31m      5", "一二         100"]
    assert aligned(rows, right=[1], width=8) == ["run    …", "a\\x1b[3…", "一二         100"[:7] + "…"]
    assert aligned([]) == []


def test_curves_are_drawn_by_letter_or_by_colour() -> None:
    curves = {"A": [(0, 0.0), (10, 1.0)], "B": [(0, 1.0), (5, None), (10, 1.0)]}
    lines = plot(curves, width=10, height=4)
    assert lines[0] == "        1 │BBBBBBBBBB" and lines[3].startswith("        0 │AA")
    assert lines[-1].split() == ["0", "step", "10"]
    assert "\x1b[36m⣀" in "".join(plot(curves, width=10, height=4, has_colours=True)) or "⠀" not in lines
    assert plot({"A": []}) == [] and plot({"A": [(1, float("nan"))]}) == []
    assert plot({"A": [(40, 0.5)]})[-1].split() == ["40", "step", "40"]


def test_an_svg_keeps_a_spike_of_a_long_curve_and_runs_nothing() -> None:
    curve = [(step, 100.0 if step == 4321 else 1.0) for step in range(10_000)]
    drawn = svg({"<a>": curve}, "loss & more")
    root = ElementTree.fromstring(drawn)
    places = root.find("{*}polyline").get("points").split()  # type: ignore[union-attr]
    assert len(places) < 1000 and min(float(place.partition(",")[2]) for place in places) == 24.0
    assert "script" not in drawn and svg({"a": []}, "loss") == ""


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 3, 0.123456, "x", True)] == ["", "3", "0.1235", "x", "True"]
    assert number(0.5, "+") == "+0.5"
