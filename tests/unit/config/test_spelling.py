"""What is advised can be pasted: values as Hydra reads them back, and names that are close."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_train.config.spelling import nearest, text_of


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        "adamw",
        "null",
        "True",
        "two words",
        "a=b,c",
        'a "quoted" word',
        "",
        [1, "x y", None],
        {"a": [1, {"b": "é"}]},
    ],
)
def test_hydra_reads_a_value_back_as_it_was(value: Any) -> None:
    assert OverridesParser.create().parse_override(f"key={text_of(value)}").value() == value


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainer.max_step", "trainer.max_steps"),
        ("trainer.num_workers", "loader.num_workers"),
        ("trainer.gradient_clip_val", "trainer.clip_grad_norm"),
        ("optimzer.lr", "optimizer.lr"),
        ("trainer.something_else", ""),
    ],
)
def test_the_name_that_was_meant_is_found_in_its_section_first(name: str, meant: str) -> None:
    names = ["trainer.max_steps", "trainer.clip_grad_norm", "loader.num_workers", "loader.drop_last", "optimizer.lr"]
    assert nearest(name, names) == meant
