"""Callbacks that cannot work are refused before any process starts."""

from __future__ import annotations

import sys

import pytest

from ddp_train.config.check import CONF, ConfigErrors
from tests.unit.parts import checked

HERE = "tests.unit.config.test_callbacks"


class Foreign:
    """A callback of another trainer."""

    def on_evaluate(self) -> None: ...


class Fine:
    def step(self, run: object) -> None: ...


def test_a_class_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(ConfigErrors, match=r"has none of the methods start, .*on_evaluate was meant as evaluation"):
        checked(f"+callbacks.mine._target_={HERE}.Foreign")
    assert checked(f"+callbacks.mine._target_={HERE}.Fine").callbacks == {"mine": {"_target_": f"{HERE}.Fine"}}


def test_early_stopping_needs_an_evaluation_and_freeze_its_patterns() -> None:
    with pytest.raises(ConfigErrors, match=r"callbacks\.early_stopping: follows a metric") as caught:
        checked("callbacks=[early_stopping,freeze]", "data.eval=null", base=["model=mlp"])
    assert "callbacks.freeze.patterns" in str(caught.value)


def test_ours_are_checked_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("ddp_train.callbacks")]:
        monkeypatch.delitem(sys.modules, module)
    options = sorted(path.stem for path in (CONF / "callbacks").glob("*.yaml"))
    given = ["callbacks.freeze.patterns=[head]", "callbacks.webhook.url=http://localhost"]
    assert sorted(checked(f"callbacks=[{','.join(options)}]", *given).callbacks) == options
    assert not [name for name in sys.modules if name.startswith("ddp_train.callbacks.")]


def test_several_options_and_one_are_composed() -> None:
    assert checked().callbacks == {}
    assert list(checked("callbacks=[ema,early_stopping]").callbacks) == ["ema", "early_stopping"]
    assert list(checked("callbacks=ema", "+callbacks.again._target_=ddp_train.callbacks.device.Device").callbacks) == ["ema", "again"]
