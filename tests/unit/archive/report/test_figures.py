from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from ddp_train.archive.report.figures import write_figures
from ddp_train.archive.report.page import collect
from tests.unit.archive.report.run_files import write_run, write_sweep


def test_runs_that_differ_by_their_seed_are_one_line_with_a_band(tmp_path: Path) -> None:
    files = write_figures(collect([write_sweep(tmp_path / "sweep")]), tmp_path / "figures")
    assert {file.name for file in files} == {"train_loss.svg", "train_lr.svg", "train_step_ms.svg", "eval_accuracy.svg", "eval_loss.svg"}
    drawn = (tmp_path / "figures/eval_accuracy.svg").read_text()
    ElementTree.fromstring(drawn)
    assert (drawn.count('stroke-width="1.5"'), drawn.count('fill-opacity="0.15"')) == (3, 3)
    assert re.findall(r">(lr=[^<]+)<", drawn) == ["lr=0.02", "lr=0.05", "lr=0.1"]


def test_a_nan_breaks_the_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<run>", nans=(20, 21))
    write_figures(collect([run]), tmp_path / "figures")
    drawn = (tmp_path / "figures/train_loss.svg").read_text()
    ElementTree.fromstring(drawn)
    assert drawn.count('stroke-width="1.5"') == 2
