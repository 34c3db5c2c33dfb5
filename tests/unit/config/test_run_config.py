"""Rates that follow the global batch, from the keys to the first step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ddp_train.config.run_config import data_config, evaluation_sets, set_name
from ddp_train.errors import ConfigError, ConfigErrors
from tests.unit.parts import checked, components

SQRT = ("trainer.global_batch_size=128", "optimizer.lr_scale=sqrt", "optimizer.base_batch_size=32", "optimizer.lr=0.01")
LINEAR = [word.replace("sqrt", "linear") for word in SQRT]


def rates(*overrides: str) -> list[float]:
    return [float(group["lr"]) for group in components(*overrides).optimizer.param_groups]


def test_all_rates_follow_the_global_batch() -> None:
    own = "+optimizer.groups.bias={match: '*.bias', lr: 0.5}"
    assert rates("scheduler=constant", *SQRT, own) == pytest.approx([0.02, 1.0])
    assert rates("scheduler=constant", "optimizer=sgd", *LINEAR, own) == pytest.approx([0.04, 2.0])
    assert rates("scheduler=constant", "optimizer=muon", *SQRT, "optimizer.adamw_lr=0.003") == pytest.approx([0.02, *[0.006] * 2])
    assert rates("scheduler=constant", *(word.replace("=128", "=32") for word in SQRT)) == pytest.approx([0.01, 0.01])


def test_the_schedule_goes_from_the_scaled_rate() -> None:
    parts = components(*SQRT, "scheduler=warmup_linear", "scheduler.warmup_steps=1", "trainer.max_steps=3")
    assert parts.scheduler.get_last_lr() == pytest.approx([0.01, 0.01])
    assert [group["initial_lr"] for group in parts.optimizer.param_groups] == pytest.approx([0.02, 0.02])


def test_what_it_comes_to_is_said() -> None:
    (line,) = checked(*SQRT).batch_notes()
    assert line == "all rates of the optimizer x 2: 0.02 in place of 0.01 (optimizer.lr_scale=sqrt, 128 / optimizer.base_batch_size 32)"
    assert checked().batch_notes() == []


def test_a_batch_that_follows_the_number_of_ranks_is_said() -> None:
    several = checked("cluster.processes_per_node=3", "loader.micro_batch_size=8")
    assert several.batch_notes() == ["another number of ranks changes the batch and the result; trainer.global_batch_size=24 keeps both"]
    assert checked("cluster.processes_per_node=3", "trainer.global_batch_size=24").batch_notes() == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optimizer.lr_scale=cubic", "optimizer.base_batch_size=1"], r"lr_scale: is 'cubic'"),
        (["optimizer.lr_scale=linear"], r"base_batch_size: is not given, and optimizer\.lr_scale is linear"),
        (["optimizer.base_batch_size=32"], r"lr_scale: is not given, and optimizer\.base_batch_size is 32"),
        (["optimizer.lr_scale=linear", "optimizer.base_batch_size=0"], r"base_batch_size: is 0"),
        ([*SQRT, "trainer.batch_size_schedule={4: 64}"], r"lr_scale: is sqrt, and trainer\.batch_size_schedule has several sizes"),
        (
            [*SQRT, "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "+scheduler.max_lr=0.1"],
            r"scheduler\.max_lr: sets the rate itself",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors, match=says):
        checked(*overrides)


class Finding(torch.optim.SGD):
    """Finds its rate itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        for group in self.param_groups:
            group["lr"] = None


def test_an_optimizer_without_a_rate_is_refused() -> None:
    bare = [
        f"optimizer._target_={__name__}.Finding",
        *(f"~optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "fused")),
        *SQRT[:3],
    ]
    with pytest.raises(ConfigError, match=r"lr_scale: is given, and a Finding sets its learning rate itself"):
        components(*bare)


def test_square_root_is_the_root_of_linear() -> None:
    assert checked(*SQRT).rate_factor() == math.sqrt(checked(*LINEAR).rate_factor()) == 2


class Resize:
    def __init__(self, size: int, antialias: bool = True) -> None: ...


class Crop:
    def __init__(self, size: int, padding: int = 0) -> None: ...


DATA: dict[str, Any] = {
    "_target_": "my.Data",
    "root": "data",
    "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 2}},
    "transform": {"_target_": f"{__name__}.Crop", "size": 8, "padding": 4},
    "scales": [1, 2],
}


def test_groups_are_merged_and_lists_and_values_are_replaced() -> None:
    changes = {"root": "test", "reader": {"options": {"threads": 0}}, "scales": [1], "more": {"a": 1}}
    assert data_config({"data": {**DATA, "eval": changes}}, "data.eval") == {
        **DATA,
        "root": "test",
        "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 0}},
        "scales": [1],
        "more": {"a": 1},
    }
    assert DATA["reader"]["options"]["threads"] == 2


def test_another_class_takes_over_what_it_has_by_name() -> None:
    split = data_config({"data": {**DATA, "eval": {"transform": {"_target_": f"{__name__}.Resize"}}}}, "data.eval")
    assert split["transform"] == {"_target_": f"{__name__}.Resize", "size": 8}
    assert split["reader"] == DATA["reader"]


def test_a_set_with_a_target_of_its_own_is_whole_and_the_others_differ_from_the_training_data() -> None:
    whole = {"_target_": "my.Data", "root": "other"}
    sets = {"hard": {"root": "hard"}, "whole": whole, "gone": None}
    tree = {"data": {**DATA, "eval": {"root": "test", "limit": 3}}, "evaluation": {"sets": sets}}
    assert list(evaluation_sets(tree)) == ["data.eval", "evaluation.sets.hard", "evaluation.sets.whole"]
    assert data_config(tree, "evaluation.sets.hard") == {**DATA, "root": "hard"}  # nothing of data.eval
    assert data_config(tree, "evaluation.sets.whole") == whole
    assert data_config(tree, "data.eval") == {**DATA, "root": "test", "limit": 3}
    assert data_config(tree, "data") == DATA
    assert [set_name(key) for key in evaluation_sets(tree)] == ["", "hard", "whole"]
    assert evaluation_sets({"data": {**DATA, "eval": None}}) == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+evaluation.sets.step_3={}", r"evaluation\.sets\.step_3: is not a valid name of an evaluation set"),
        ("+evaluation.sets={a/b: {}}", r"evaluation\.sets\.a/b: is not a valid name"),
        ("+evaluation.sets.hard=test", r"evaluation\.sets\.hard: is 'test'[\s\S]*evaluation\.sets\.hard=\{split: test\}"),
        ("+evaluation.sets.hard.nois=1", r"evaluation\.sets\.hard\.nois: .*has no argument 'nois'"),
        ("+evaluation.sets.hard.noise=loud", r"evaluation\.sets\.hard\.noise: is 'loud'"),
        ("+evaluation.sets.hard={_target_: os.system, command: ls}", r"evaluation\.sets\.hard\._target_: os\.system"),
        ("+evaluation.sets.hard.image_size=auto", r"evaluation\.sets\.hard\.image_size: is auto, and nothing provides a value"),
    ],
)
def test_what_is_wrong_with_a_set_is_told_with_its_key(override: str, said: str) -> None:
    with pytest.raises(ConfigErrors, match=said):
        checked(override)


def test_what_follows_metrics_is_content_with_a_set() -> None:
    words = ["data.eval=null", "scheduler=plateau", "callbacks=[early_stopping]", "evaluation.save_predictions=true"]
    with pytest.raises(ConfigErrors):
        checked(*words)
    assert [*evaluation_sets(checked(*words, "+evaluation.sets.hard.split=eval").tree)] == ["evaluation.sets.hard"]
    assert [*evaluation_sets(checked("+evaluation.sets.hard=null").tree)] == ["data.eval"]
