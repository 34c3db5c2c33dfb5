from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ddp_train.archive.report.figures import _mean, figure_of, write_figures
from ddp_train.archive.report.page import collect
from tests.unit.archive.report.run_files import write_run, write_sweep


def test_runs_that_differ_by_their_seed_are_one_line_with_a_band(tmp_path: Path) -> None:
    files = write_figures(collect([write_sweep(tmp_path / "sweep")]), tmp_path / "figures")
    assert {file.name for file in files} == {"train_loss.svg", "train_lr.svg", "train_step_ms.svg", "eval_accuracy.svg", "eval_loss.svg"}
    drawn = (tmp_path / "figures/eval_accuracy.svg").read_text()
    ElementTree.fromstring(drawn)
    assert (drawn.count('stroke-width="1.5"'), drawn.count('fill-opacity="0.15"')) == (3, 3)
    assert re.findall(r">(optimizer.lr=[^<]+)<", drawn) == ["optimizer.lr=0.02", "optimizer.lr=0.05", "optimizer.lr=0.1"]


def test_a_nan_breaks_the_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<run>", nans=(20, 21))
    write_figures(collect([run]), tmp_path / "figures")
    drawn = (tmp_path / "figures/train_loss.svg").read_text()
    ElementTree.fromstring(drawn)
    assert drawn.count('stroke-width="1.5"') == 2


def test_a_mean_is_of_the_runs_that_have_come_so_far() -> None:
    line = _mean([[(step, 1.0) for step in (1, 2, 3, 4)], [(1, 3.0), (2, 3.0)]])
    assert line is not None
    steps, mean, half = line
    assert (steps.tolist(), mean.tolist()) == ([1, 2, 3, 4], [2.0, 2.0, 1.0, 1.0])
    assert half == pytest.approx(np.array([12.706, 12.706, 0.0, 0.0]), rel=1e-3)


def test_a_mean_that_has_no_value_is_not_drawn() -> None:
    curve, nans = [(1, 1.0), (2, 2.0)], [(1, None), (2, None)]
    assert figure_of("train/loss", {"all": [curve, nans]}) == ""
    assert "other" in figure_of("train/loss", {"all": [curve, nans], "other": [curve]})


def test_runs_whose_settings_differ_in_keys_of_one_last_word_are_two_lines(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n), model={"size": n}, data={"size": 1}) for n in range(2)]
    runs.append(write_run(tmp_path / "2", model={"size": 1}, data={"size": 2}))
    write_figures(collect(runs), tmp_path / "figures")
    assert (tmp_path / "figures/train_loss.svg").read_text().count('stroke-width="1.5"') == 3
