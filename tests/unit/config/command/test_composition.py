"""Who chose each option, and which file or word gave each value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir, version
from hydra.types import RunMode
from hydra.utils import instantiate

from ddp_train.config.command.composition import TYPED, Composition, Value, loader_of, parse

MNIST = "conf/experiment/mnist_convnet.yaml"


@pytest.fixture(autouse=True)
def as_the_command_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    version.setbase("1.3")


def composition(*words: str) -> Composition:
    args = parse(list(words))
    loader = loader_of(args)
    composed = loader.load_configuration(args.config_name or "config", args.overrides, run_mode=RunMode.RUN)
    return Composition(loader, composed)


def values(*words: str) -> dict[str, Value]:
    return {each.key: each for each in composition(*words).values}


def test_without_a_word_every_option_is_the_defaults() -> None:
    found = composition()
    assert {each.source for each in found.choices} == {"conf/config.yaml"}
    assert [each for each in found.choices if each.instead_of] == []
    assert {each.source for each in found.values} <= {"conf/data/synthetic_images.yaml"}  # an option of data has batch sizes that suit it


def test_an_option_is_chosen_by_a_word_or_by_an_experiment() -> None:
    found = {each.group: each for each in composition("experiment=mnist_convnet", "optimizer=sgd").choices}
    assert (found["optimizer"].option, found["optimizer"].source, found["optimizer"].instead_of) == ("sgd", TYPED, "adamw")
    assert (found["data"].option, found["data"].source, found["data"].instead_of) == ("mnist", MNIST, "synthetic_images")
    assert (found["experiment"].source, found["scheduler"].source) == (TYPED, "conf/config.yaml")
    assert list(found)[:2] == ["loader", "evaluation"]


def test_a_value_says_what_it_replaced() -> None:
    found = values("experiment=mnist_convnet", "optimizer.lr=0.5", "trainer.max_steps=9")
    assert found["optimizer.lr"].value == 0.5
    assert found["optimizer.lr"].source == TYPED
    assert found["optimizer.lr"].instead_of == ((0.002, MNIST), (0.001, "conf/optimizer/adamw.yaml"))
    assert found["trainer.max_epochs"].source == MNIST
    assert found["trainer.max_steps"].instead_of == ((None, "conf/trainer/default.yaml"),)
    assert "optimizer.weight_decay" not in found  # the option's own


def test_what_a_preset_takes_over_from_another_is_its_own() -> None:
    assert not [key for key in values("cluster=h100_8_ib") if key.startswith("cluster.")]


def test_what_is_added_and_removed_is_found() -> None:
    found = composition("+cluster.env.NCCL_DEBUG=INFO", "+extra={a:1,b:{c:2}}", "~metrics.tensorboard")
    added = {each.key: each for each in found.values}
    assert added["cluster.env.NCCL_DEBUG"].instead_of == ()
    assert (added["extra.a"].value, added["extra.b.c"].value) == (1, 2)
    assert found.removed == ["metrics.tensorboard"]


def test_values_stay_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    assert values("+extra.hub_token=${oc.env:HF_TOKEN}")["extra.hub_token"].value == "${oc.env:HF_TOKEN}"


def test_folders_and_roots_of_ones_own_have_their_names(tmp_path: Path) -> None:
    (tmp_path / "mine/optimizer").mkdir(parents=True)
    (tmp_path / "mine/optimizer/slow.yaml").write_text("defaults: [adamw, _self_]\nlr: 1.0e-7\n")
    (tmp_path / "mine/base.yaml").write_text("defaults: [config, override optimizer: slow, _self_]\nseed: 3\ntrainer: {max_steps: 4}\n")
    found = composition("--config-dir=mine", "--config-name=base")
    choice = next(each for each in found.choices if each.group == "optimizer")
    assert (choice.option, choice.source, choice.instead_of) == ("slow", "mine/base.yaml", "adamw")
    changed = {each.key: each for each in found.values}
    assert (changed["seed"].source, changed["seed"].instead_of) == ("mine/base.yaml", ((0, "conf/config.yaml"),))
    assert changed["trainer.max_steps"].source == "mine/base.yaml"
    assert "optimizer.lr" not in changed
    assert next(each for each in composition("--config-dir=mine", "optimizer=slow").choices if each.group == "optimizer").source == TYPED


@pytest.mark.filterwarnings("ignore:hydra.utils.instantiate:UserWarning")  # Hydra 1.4: the application gives no whitelist
def test_a_users_own_hydra_application_composes_our_groups(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "defaults: [{model: mlp}, {optimizer: sgd}, _self_]\n"
        "hydra: {searchpath: ['pkg://ddp_train.conf']}\n"
        "model: {image_shape: [3, 8, 8]}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        composed = compose("config", ["model.num_classes=5"])
    assert instantiate(composed.model)(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert composed.optimizer._target_ == "torch.optim.SGD"


def test_a_group_that_takes_several_options_shows_them_as_a_list() -> None:
    found = {each.group: each for each in composition("metrics=[csv]").choices}["metrics"]
    assert (found.option, found.source, found.instead_of) == ("[csv]", TYPED, "[]")
    assert "metrics" not in values("metrics=[csv]")
    assert {each.group: each.option for each in composition().choices}["metrics"] == "[]"


def test_a_project_that_is_not_there_is_no_choice_and_one_that_is_goes_over_the_defaults(tmp_path: Path) -> None:
    assert "project" not in {each.group for each in composition().choices}
    (tmp_path / "mine/project").mkdir(parents=True)
    (tmp_path / "mine/project/default.yaml").write_text("# @package _global_\ndefaults: [override /model: mlp]\nseed: 7\n")
    assert values("--config-dir=mine")["seed"].source == "mine/project/default.yaml"
    chosen = {each.group: each.option for each in composition("--config-dir=mine", "experiment=mnist_convnet").choices}
    assert (chosen["project"], chosen["model"]) == ("default", "convnet")  # the experiment goes over the project
