"""The nodes of the data: what an evaluation set inherits from the training data, and what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_train.config.evaluation_sets import data_node, evaluation_sets, set_name
from ddp_train.errors import ConfigErrors
from tests.unit.parts import checked


class Resize:
    def __init__(self, size: int, antialias: bool = True) -> None: ...


class Crop:
    def __init__(self, size: int, padding: int = 0) -> None: ...


NODE: dict[str, Any] = {
    "_target_": "my.Data",
    "root": "data",
    "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 2}},
    "transform": {"_target_": f"{__name__}.Crop", "size": 8, "padding": 4},
    "scales": [1, 2],
}


def test_groups_are_merged_and_lists_and_values_are_replaced() -> None:
    changes = {"root": "test", "reader": {"options": {"threads": 0}}, "scales": [1], "more": {"a": 1}}
    assert data_node({"data": {**NODE, "eval": changes}}, "data.eval") == {
        **NODE,
        "root": "test",
        "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 0}},
        "scales": [1],
        "more": {"a": 1},
    }
    assert NODE["reader"]["options"]["threads"] == 2


def test_another_class_takes_over_what_it_has_by_name() -> None:
    split = data_node({"data": {**NODE, "eval": {"transform": {"_target_": f"{__name__}.Resize"}}}}, "data.eval")
    assert split["transform"] == {"_target_": f"{__name__}.Resize", "size": 8}
    assert split["reader"] == NODE["reader"]


def test_a_set_with_a_target_of_its_own_is_whole_and_the_others_differ_from_the_training_data() -> None:
    whole = {"_target_": "my.Data", "root": "other"}
    sets = {"hard": {"root": "hard"}, "whole": whole, "gone": None}
    tree = {"data": {**NODE, "eval": {"root": "test", "limit": 3}}, "evaluation": {"sets": sets}}
    assert list(evaluation_sets(tree)) == ["data.eval", "evaluation.sets.hard", "evaluation.sets.whole"]
    assert data_node(tree, "evaluation.sets.hard") == {**NODE, "root": "hard"}  # nothing of data.eval
    assert data_node(tree, "evaluation.sets.whole") == whole
    assert data_node(tree, "data.eval") == {**NODE, "root": "test", "limit": 3}
    assert data_node(tree, "data") == NODE
    assert [set_name(key) for key in evaluation_sets(tree)] == ["", "hard", "whole"]
    assert evaluation_sets({"data": {**NODE, "eval": None}}) == {}


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
