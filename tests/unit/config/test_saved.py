"""config.yaml has what each `auto` came to, and a run that goes on is held to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from ddp_train.cli import saved_run
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import changes, config_text, record_answers
from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import RunFolder
from tests.unit.parts import checked


def record(folder: Path, run: RunConfig, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a run in a folder, up to the point where its data is there; return config.yaml."""
    RunFolder(folder).record_config(config_text(run, folder))
    record_answers(RunFolder(folder).config, run, answers)
    written: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return written


def test_config_yaml_has_what_they_came_to_and_a_resumed_run_the_same_hash(tmp_path: Path) -> None:
    run = checked()
    answers = {"model.image_shape": (3, 16, 16), "model.num_classes": torch.tensor(10), "scheduler.total_steps": 20}
    written = record(tmp_path, run, answers)
    assert (written["model"]["image_shape"], written["model"]["num_classes"]) == ([3, 16, 16], 10)
    assert (written["scheduler"]["total_steps"], written["metrics"]["jsonl"]["step"]) == (20, "auto")
    assert written["auto"] == list(answers)
    again = saved_run.frozen_job(tmp_path, []).config
    assert (again.tree, again.hash()) == (run.tree, run.hash())
    assert record(tmp_path, again, answers) == written
    longer = record(tmp_path, saved_run.frozen_job(tmp_path, ["trainer.max_steps=40"]).config, {**answers, "scheduler.total_steps": 40})
    assert longer["scheduler"]["total_steps"] == 40  # the run's own facts follow what was typed
    assert len(list(tmp_path.glob("config.*.yaml"))) == 1  # of the attempt with fewer steps


def test_data_that_answers_otherwise_when_a_run_goes_on_is_refused(tmp_path: Path) -> None:
    run = checked()
    record(tmp_path, run, {"model.num_classes": 10})
    with pytest.raises(ConfigError, match=r"said 10 when the run began, and says 11 now") as raised:
        record(tmp_path, saved_run.frozen_job(tmp_path, []).config, {"model.num_classes": 11})
    advised = raised.value.fix.partition(",")[0]
    assert advised == "model.num_classes=10"
    kept = record(tmp_path, saved_run.frozen_job(tmp_path, [advised]).config, {})
    assert (kept["model"]["num_classes"], "auto" in kept) == (10, False)


def test_an_auto_equals_what_it_came_to_and_nothing_else(tmp_path: Path) -> None:
    run = checked()
    record(tmp_path, run, {"model.num_classes": 10, "model.image_shape": [3, 16, 16]})
    assert changes(checked(), tmp_path) == []
    assert changes(checked("model.num_classes=10"), tmp_path) == []
    assert changes(checked("model.num_classes=11"), tmp_path) == ["model.num_classes: 10 -> 11"]
    typed = tmp_path / "typed"
    record(typed, checked("model.num_classes=10"), {})
    assert changes(run, typed) == []  # until the data is there
    with pytest.raises(ConfigError, match="says 12 now"):
        record(typed, run, {"model.num_classes": 12})


def test_what_is_hashed_is_to_the_letter_what_omegaconf_writes_also_where_one_list_stands_in_two_places() -> None:
    run = checked()
    shared = ["on", "1e3", "null", "0x10", "two\nlines", "é", "", None, float("inf"), 1e-5, {"y": True, "n": {}}]
    tree = {**run.tree, "extra": {"one": shared, "two": shared}}
    apart = OmegaConf.to_container(OmegaConf.create(tree))
    assert RunConfig.of(tree, run.batch).yaml() == OmegaConf.to_yaml(OmegaConf.create(tree)) == RunConfig.of(apart, run.batch).yaml()
