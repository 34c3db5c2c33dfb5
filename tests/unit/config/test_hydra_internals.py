"""Hydra composes a single run once, and what it runs is what it would have composed again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode

from ddp_train import CONF
from ddp_train.config.hydra_internals import IS_1_4, MAIN, composing_once

pytestmark = pytest.mark.skipif(IS_1_4, reason="Hydra 1.4 asks for the mode without composing")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Return the overrides of every composition."""
    made: list[list[str]] = []
    load = ConfigLoaderImpl._load_configuration_impl

    def counted(self: ConfigLoaderImpl, config_name: str, overrides: list[str], *given: Any, **named: Any) -> Any:
        made.append(list(overrides))
        return load(self, config_name, overrides, *given, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    monkeypatch.setattr(Hydra, "multirun", lambda self, **named: made.append(["swept", *named["overrides"]]))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    return made


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Any]:
    """Return the configs that Hydra runs for a command line."""
    given: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["app", *words, "~hydra.callbacks.checked"])
    hydra.main(**MAIN, config_path=str(CONF), config_name="config")(given.append)()
    return given


def test_a_single_run_is_composed_once_and_is_the_same(monkeypatch: pytest.MonkeyPatch, times: list[list[str]]) -> None:
    words = ["trainer.max_steps=3", "hydra.run.dir=somewhere"]
    twice = run(monkeypatch, *words)
    assert len(times) == 2
    with composing_once():
        assert run(monkeypatch, *words) == twice
    assert len(times) == 3


@pytest.mark.parametrize("words", [["trainer.max_stepss=3"], ["experiment=???"], ["seed=1,2"]])
def test_an_error_costs_one_composition(monkeypatch: pytest.MonkeyPatch, times: list[list[str]], words: list[str]) -> None:
    with composing_once(), pytest.raises(ConfigCompositionException):
        run(monkeypatch, *words)
    assert len(times) <= 1


@pytest.mark.parametrize("words", [["-m"], ["--multirun", "hydra.mode=RUN"], ["hydra.mode=MULTIRUN"], ["+hydra.mode=MULTIRUN"]])
def test_a_sweep_is_not_composed_for_its_mode(monkeypatch: pytest.MonkeyPatch, times: list[list[str]], words: list[str]) -> None:
    with composing_once():
        run(monkeypatch, *words, "seed=1,2")
    assert [made[0] for made in times] == ["swept"]


def test_a_yaml_may_ask_for_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: list[list[str]]) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "many.yaml").write_text("# @package _global_\nhydra:\n  mode: MULTIRUN\n")
    with composing_once():
        run(monkeypatch, "--config-dir=own", "experiment=many")
    assert times[-1][0] == "swept"


def test_nothing_stays_behind() -> None:
    before = Hydra.get_mode
    with composing_once():
        assert Hydra.get_mode is not before
    assert Hydra.get_mode is before
    assert RunMode.RUN in RunMode
