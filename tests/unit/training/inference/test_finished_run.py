"""A run is had back from its folder: its model with the weights that it has saved, its config, its data and its metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import ddp_train
from ddp_train.checkpoint.read import read_shared
from ddp_train.config.run_config import RunConfig
from ddp_train.errors import ConfigError, UserError
from ddp_train.training.inference.finished_run import load
from tests.conftest import TINY_CONVNET
from tests.unit.parts import checked, components, saved
from tests.unit.training.finished import finished


def test_a_run_is_loaded_with_its_weights_config_data_and_metrics(tmp_path: Path) -> None:
    parts = finished(tmp_path)
    before = torch.random.get_rng_state()
    run = ddp_train.load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert type(run.model) is type(parts.model) and not run.model.training
    ours, theirs = run.model.state_dict(), parts.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (run.step, run.checkpoint) == (7, tmp_path / "checkpoints/step_00000007")
    assert run.config["model"]["num_classes"] == 10  # which was auto
    assert (len(run.data), len(run.eval_data)) == (640, 101)
    assert [record["step"] for record in run.metrics] == [5, 7]


def test_a_checkpoint_of_a_run_is_loaded(tmp_path: Path) -> None:
    parts = finished(tmp_path)
    nn.init.zeros_(next(parts.model.parameters()))
    saved(tmp_path / "checkpoints", 9, parts)
    assert load(tmp_path).step == 9
    assert load(tmp_path / "checkpoints/last").step == 9
    first = load(str(tmp_path / "checkpoints/step_00000007"))
    assert first.step == 7 and next(first.model.parameters()).any()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a run folder nor a checkpoint"):
        load(tmp_path)
    config: RunConfig = checked(base=TINY_CONVNET)
    (tmp_path / "config.yaml").write_text(config.yaml())
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        load(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    finished(tmp_path)
    tree = OmegaConf.load(tmp_path / "config.yaml")
    tree.model.width = 8
    OmegaConf.save(tree, tmp_path / "config.yaml")
    with pytest.raises(UserError, match="does not fit the model"):
        load(tmp_path)


def test_a_folder_that_others_can_write_is_loaded_where_it_is_trusted(tmp_path: Path) -> None:
    finished(tmp_path)
    os.chmod(tmp_path / "config.yaml", 0o666)
    with pytest.raises(ConfigError, match="every user can write") as refused:
        load(tmp_path)
    assert "model._target_: ddp_train.model" in str(refused.value) and "load(RUN, trust=True)" in str(refused.value)
    assert load(tmp_path, trust=True).step == load(tmp_path).step  # this process does not ask again


def test_the_package_imports_no_torch_until_it_is_asked() -> None:
    code = "import sys, ddp_train; assert 'load' in dir(ddp_train); assert not {'torch', 'hydra', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="lead"):
        _ = ddp_train.lead


def test_parts_of_a_checkpoint_are_read_alone(tmp_path: Path) -> None:
    parts = components(base=TINY_CONVNET)
    checkpoint = saved(tmp_path, 3, parts)
    found = read_shared(checkpoint, only=("model", "model_versions", "nothing"))
    assert found.keys() == {"model", "model_versions"}
    assert all(torch.equal(found["model"][name], value) for name, value in parts.model.state_dict().items())
