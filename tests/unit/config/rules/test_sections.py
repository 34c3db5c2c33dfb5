"""Callbacks that cannot work are refused before any process starts."""

from __future__ import annotations

import pytest

from ddp_train.config.rules import sections
from ddp_train.errors import ConfigErrors
from ddp_train.interfaces import Callback
from tests.unit.parts import checked

HERE = "tests.unit.config.rules.test_sections"


class Foreign:
    """A callback of another trainer."""

    def on_evaluate(self) -> None: ...


class Idle(Callback):
    """It inherits from our class, and has no event of its own."""

    def on_evaluate(self) -> None: ...


class Fine:
    def step(self, run: object) -> None: ...


@pytest.mark.parametrize("name", ["Foreign", "Idle"])
def test_a_class_that_would_never_be_called_is_refused(name: str) -> None:
    with pytest.raises(ConfigErrors, match=r"has none of the methods start, step, evaluation, save, end: it would never be called"):
        checked(f"+callbacks.mine._target_={HERE}.{name}")
    assert checked(f"+callbacks.mine._target_={HERE}.Fine").callbacks == {"mine": {"_target_": f"{HERE}.Fine"}}


def test_early_stopping_needs_an_evaluation_and_freeze_its_patterns() -> None:
    with pytest.raises(ConfigErrors, match=r"callbacks\.early_stopping: follows a metric") as caught:
        checked("callbacks=[early_stopping,freeze]", "data.eval=null", base=["model=mlp"])
    assert "callbacks.freeze.patterns" in str(caught.value)


def test_ours_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sections, "look_up_or_none", asked.append)
    checked("callbacks=ema", f"+callbacks.mine._target_={HERE}.Fine")
    assert asked == [f"{HERE}.Fine"]


def test_several_options_and_one_are_composed() -> None:
    assert checked().callbacks == {}
    assert list(checked("callbacks=[ema,early_stopping]").callbacks) == ["ema", "early_stopping"]
    assert list(checked("callbacks=ema", "+callbacks.again._target_=ddp_train.callbacks.learning_rate.LearningRate").callbacks) == [
        "ema",
        "again",
    ]


def test_a_rule_ends_where_it_reads_an_invalid_section_and_all_others_are_asked() -> None:
    with pytest.raises(ConfigErrors) as caught:
        checked(
            "trainer.max_steps=0", "loader.num_workers=1", "loader.on_device=true", "evaluation.save_predictions=true", "data.eval=null"
        )
    assert [error.key for error in caught.value.errors] == ["trainer.max_steps", "loader.num_workers", "evaluation.save_predictions"]


def test_batch_sizes_that_contradict_each_other_are_said_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        checked("trainer.global_batch_size=7", "trainer.grad_accum_steps=3", "loader.num_workers=1", "loader.on_device=true")
    assert sorted(error.key for error in caught.value.errors) == ["loader.num_workers", "trainer.global_batch_size"]
