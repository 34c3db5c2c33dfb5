"""Hydra composes a command line once, and what it runs is what it would have composed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf

from ddp_train.cli.composed_once import composed_once
from ddp_train.config.check import CONF
from ddp_train.config.hydra_internals import IS_1_4

pytestmark = pytest.mark.skipif(IS_1_4, reason="Hydra 1.4 asks for the mode without composing")

TYPED = ["trainer.max_steps=3", "hydra.run.dir=somewhere"]


@pytest.fixture
def hydra() -> Iterator[Hydra]:
    yield Hydra.create_main_hydra2(task_name="app", config_search_path=create_config_search_path(str(CONF)))
    GlobalHydra.instance().clear()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the overrides of every composition."""
    made: list[list[str]] = []
    load = ConfigLoaderImpl._load_configuration_impl

    def counted(self: ConfigLoaderImpl, config_name: str, overrides: list[str], *given: Any, **named: Any) -> Any:
        made.append(list(overrides))
        return load(self, config_name, overrides, *given, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    return made


def composed(hydra: Hydra, overrides: list[str], mode: RunMode = RunMode.RUN) -> Any:
    """Compose as Hydra does: for the mode, and then to run."""
    hydra.get_mode("config", overrides)
    return hydra.compose_config("config", [*overrides, f"hydra.mode={mode.name}"], run_mode=mode)


@pytest.mark.parametrize("mode", RunMode)
def test_the_second_time_gives_the_same_as_composing_again(hydra: Hydra, times: list[list[str]], mode: RunMode) -> None:
    again = composed(hydra, TYPED, mode)
    assert len(times) == 2
    with composed_once():
        once = composed(hydra, TYPED, mode)
    assert len(times) == 3
    assert OmegaConf.to_yaml(once) == OmegaConf.to_yaml(again)
    assert once.hydra.mode == mode


def test_other_overrides_are_composed(hydra: Hydra, times: list[list[str]]) -> None:
    with composed_once():
        hydra.get_mode("config", TYPED)
        other = hydra.compose_config("config", [*TYPED, "seed=7"], run_mode=RunMode.RUN)
        third = hydra.compose_config("config", TYPED, run_mode=RunMode.RUN)  # what was kept is gone
    assert other.seed == 7
    assert third.seed != 7
    assert len(times) == 3


def test_a_single_run_refuses_what_a_sweep_leaves_open(hydra: Hydra) -> None:
    with composed_once():
        assert composed(hydra, ["experiment=???"], RunMode.MULTIRUN)
        with pytest.raises(ConfigCompositionException):
            composed(hydra, ["experiment=???"])
        with pytest.raises(ConfigCompositionException, match="sweep"):
            composed(hydra, ["seed=1,2"])


def test_an_error_is_told_the_second_time_too(hydra: Hydra, times: list[list[str]]) -> None:
    with composed_once(), pytest.raises(ConfigCompositionException, match="max_stepss"):
        composed(hydra, ["trainer.max_stepss=3"])
    assert len(times) == 1


def test_nothing_stays_behind() -> None:
    before = ConfigLoaderImpl.load_configuration
    with composed_once():
        assert ConfigLoaderImpl.load_configuration is not before
    assert ConfigLoaderImpl.load_configuration is before
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert compose("config").seed == compose("config").seed
