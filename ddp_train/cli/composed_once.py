"""Hydra composes a command line twice: to learn its `hydra.mode`, and to run it. Here the second time takes what the first one made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_train.config.hydra_internals import IS_1_4, ConfigLoaderImpl

_MODES = {f"hydra.mode={mode.name}": mode for mode in RunMode}
"""What Hydra adds to the overrides where nothing else says what the mode is."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What came of composing for the mode alone."""

    loader: ConfigLoaderImpl
    config_name: str | None
    overrides: list[str]
    came: DictConfig | Exception

    def serves(self, loader: ConfigLoaderImpl, config_name: str | None, overrides: list[str], run_mode: RunMode) -> bool:
        """Tell whether composing again would give the same, but for the mode."""
        added = overrides[len(self.overrides) :]
        is_same = loader is self.loader and config_name == self.config_name and overrides == self.overrides + added
        if isinstance(self.came, Exception):
            is_whole = True
        else:  # A sweep may leave a group open, which its jobs choose. A single run must not, and composing says so.
            choices: Any = OmegaConf.to_container(self.came.hydra.runtime.choices, resolve=False)
            is_whole = run_mode == RunMode.MULTIRUN or "???" not in choices.values()
        return is_same and is_whole and len(added) <= 1 and all(text in _MODES for text in added)


@contextmanager
def composed_once() -> Iterator[None]:
    """Let Hydra's `run` and `multirun` have what `get_mode` has composed, with the mode that Hydra adds."""
    if IS_1_4:  # which asks for the mode without composing
        yield
        return
    compose = ConfigLoaderImpl.load_configuration
    asked: list[_Asked] = []

    def load_configuration(
        self: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if not validate_sweep_overrides:  # for the mode alone: nobody keeps it, or changes it
            try:
                came: DictConfig | Exception = compose(self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
            except Exception as error:
                came = error
            asked[:] = [_Asked(loader=self, config_name=config_name, overrides=list(overrides), came=came)]
            return _result(came)
        before = asked.pop() if asked else None
        if before is None or not before.serves(self, config_name, overrides, run_mode):
            return compose(self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        self.validate_sweep_overrides_legal(OverridesParser.create().parse_overrides(overrides), run_mode=run_mode, from_shell=from_shell)
        composed = _result(before.came)
        for text in overrides[len(before.overrides) :]:
            composed.hydra.mode = _MODES[text]
            composed.hydra.overrides.hydra.append(text)
        return composed

    patched: Any = ConfigLoaderImpl
    patched.load_configuration = load_configuration
    try:
        yield
    finally:
        patched.load_configuration = compose


def _result(came: DictConfig | Exception) -> DictConfig:
    if isinstance(came, Exception):
        raise came
    return came
