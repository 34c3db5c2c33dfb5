"""What differs for the evaluation data, to any depth."""

from __future__ import annotations

from typing import Any

from ddp_train.config.evaluation_split import evaluation_split


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
    assert evaluation_split({**NODE, "eval": changes}) == {
        **NODE,
        "root": "test",
        "reader": {"_target_": "my.Reader", "options": {"fast": True, "threads": 0}},
        "scales": [1],
        "more": {"a": 1},
    }
    assert NODE["reader"]["options"]["threads"] == 2


def test_another_class_takes_over_what_it_has_by_name() -> None:
    split = evaluation_split({**NODE, "eval": {"transform": {"_target_": f"{__name__}.Resize"}}})
    assert split["transform"] == {"_target_": f"{__name__}.Resize", "size": 8}
    assert split["reader"] == NODE["reader"]
