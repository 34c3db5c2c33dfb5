"""What a person sees: what most have, the odd one out, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_train.doctor.problems import problems
from ddp_train.doctor.table import screen
from tests.unit.doctor.examined import three


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def test_fit_machines_are_a_table_and_one_line() -> None:
    text = screen(three(), [], seconds=2.0)
    assert text.startswith("doctor   3 machines, 3 ranks, 2.0 s\n")
    assert text.endswith("fit: nothing is wrong")
    assert "all-reduce" in text and "exact" in text
    assert "node1" not in text  # nobody is odd


def test_the_odd_one_out_stands_by_itself_and_below_is_what_to_do() -> None:
    examined = three(machines={2: {"open_files": 256}}, told={2: {"versions": {"python": "3.11.2", "torch": "2.12", "ddp_train": "1"}}})
    lines = screen(examined, problems(examined), seconds=2.0).splitlines()
    assert next(line for line in lines if line.startswith("torch")).split() == ["torch", "2.13.0", "node2:", "2.12"]
    assert next(line for line in lines if line.startswith("open files")).split() == ["open", "files", "65536", "node2:", "256"]
    assert "2 problems:" in lines
    assert "  fix: install the same versions on each machine" in lines


def test_one_machine_has_no_odd_one_and_sums_that_were_not_tried_are_said() -> None:
    whole = three()
    one = replace(whole, count=1, processes=1, machines={0: whole.machines[0]}, peers={0: whole.peers[0]}, measurements=None)
    text = screen(one, [], seconds=2.0)
    assert "odd" not in text
    assert "not tried" in text
