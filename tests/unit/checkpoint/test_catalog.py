"""Checkpoints by name: which one is the best, which the last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_train.checkpoint.catalog import candidates, find_checkpoint, ranking_for, saved_checkpoints
from ddp_train.checkpoint.manifest import Ranking
from ddp_train.errors import ConfigError, UserError
from tests.unit.parts import LOSS, manifest

ACCURACY = Ranking(metric="eval/accuracy", goal="max")


def test_the_metric_is_the_objectives_and_has_a_direction() -> None:
    goals = {"accuracy": "max", "loss": "min"}
    assert ranking_for(goals, metric=None, is_evaluated=True) == ACCURACY
    assert ranking_for(goals, metric="eval/loss", is_evaluated=True) == LOSS
    assert ranking_for(goals, metric=None, is_evaluated=False) == Ranking(metric="train/loss", goal="min")
    with pytest.raises(ConfigError, match=r"(?s)eval/los'.*one of eval/accuracy, eval/loss"):
        ranking_for(goals, metric="eval/los", is_evaluated=True)
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        ranking_for(goals, metric="eval/loss", is_evaluated=False)


def put(folder: Path, step: int, metrics: Mapping[str, Any], ranked_by: Ranking = LOSS) -> Path:
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(manifest(step, metrics=metrics, ranked_by=ranked_by).to_bytes())
    (path / "COMPLETE").touch()
    return path


def test_best_and_last_are_found_by_name_and_damaged_ones_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(UserError, match="best is no checkpoint"):
        find_checkpoint(folder / "best", lambda path: "best is no checkpoint", key="resume")
    one = put(folder, 1, {"eval/loss": 0.5, "eval/accuracy": 0.1})
    two = put(folder, 2, {"eval/loss": 0.4, "eval/accuracy": 0.2})
    three = put(folder, 3, {"eval/loss": 0.6, "eval/accuracy": 0.3})
    four = put(folder, 4, {})
    (put(folder, 5, {"eval/loss": 0.0}) / "COMPLETE").unlink()
    (put(folder, 6, {"eval/loss": 0.0}) / "manifest.json").write_text("[" * 100_000)
    assert candidates(folder / "best") == [two, one, three]
    assert candidates(folder / "last") == [four, three, two, one]
    assert find_checkpoint(folder / "best", lambda path: "a file is damaged" if path == two else None, key="resume") == one
    assert "checkpoint step_00000002 is not used: a file is damaged" in capsys.readouterr().out
    put(folder, 7, {}, ranked_by=ACCURACY)  # the run goes on under another metric
    assert candidates(folder / "best") == [three, two, one]
    with pytest.raises(UserError, match="all checkpoints are damaged"):
        find_checkpoint(folder / "last", lambda path: "damaged", key="resume")


def test_a_name_without_a_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        find_checkpoint(folder / "last", lambda path: None, key="resume")
    put(folder, 1, {"train/loss": 1.0})
    with pytest.raises(ConfigError, match="none of the 1 checkpoints was saved right after an evaluation"):
        find_checkpoint(folder / "best", lambda path: None, key="resume")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.1", [0.1], 10**400])
def test_what_is_no_finite_number_is_never_the_best(tmp_path: Path, value: Any) -> None:
    put(tmp_path, 1, {"eval/loss": value})
    two = put(tmp_path, 2, {"eval/loss": 0.7})
    assert len(saved_checkpoints(tmp_path)) == 2
    assert candidates(tmp_path / "best") == [two]
