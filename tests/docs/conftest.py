"""What a reader would do with a page: stand in a folder with its files, and type what it shows."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_train import CONF
from ddp_train.config.check import check_config
from ddp_train.config.command import hydra_errors
from ddp_train.config.command.command_line import options_first
from ddp_train.config.command.composition import loader_of, parse
from ddp_train.errors import ConfigErrors

STAND_INS = Path(__file__).parent / "stand_ins"
"""What pages speak of as the reader's own and do not show: `my_package`."""

EXTRAS = ("datasets", "timm", "torchvision", "transformers", "torchmetrics", "schedulefree", "wandb", "mlflow", "trackio", "webdataset")
"""Packages that may be missing here; what needs one that is missing is composed and not checked."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the folder in which a reader stands, with what pages do not show."""
    shutil.copytree(STAND_INS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in STAND_INS.glob("*.py"):  # of another test's folder
        sys.modules.pop(path.stem, None)
    before, environment = set(sys.modules), dict(os.environ)
    version.setbase("1.3")
    yield tmp_path
    for name in set(os.environ) - set(environment):  # what packages set that pages name
        del os.environ[name]
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def compose(words: list[str]) -> tuple[DictConfig, DictConfig]:
    """Return what Hydra makes of what is typed at `ddp-train`, of a sweep the first job: the run's configuration, and Hydra's own node."""
    args = parse(options_first([word for word in words if word != "--full"]))
    overrides = [_first(each) for each in OverridesParser.create().parse_overrides(args.overrides)]
    composed = loader_of(args).load_configuration(args.config_name or "config", overrides, run_mode=RunMode.RUN)
    config: DictConfig = composed.copy()
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return config, composed.hydra


def problems_of(words: list[str]) -> list[str]:
    """Return what is wrong with what is typed at `ddp-train`. What needs a package or GPU that is not here is not looked at further."""
    try:
        config, hydra = compose(words)
        check_config(config, hydra=hydra)
    except ConfigErrors as errors:
        found = [str(error) for error in errors.errors]
        return [error for error in found if not is_missing_package(error) and "; auto is for GPUs" not in error]
    except Exception as error:
        return [hydra_errors.explain_hydra_error(error, words, CONF)]
    return []


def _first(override: Override) -> str:
    """Return an override with the first value of a sweep."""
    value: Any = override.value()
    text = str(override.input_line)
    if isinstance(value, ChoiceSweep):
        return text.partition("=")[0] + "=" + str(next(iter(value.list)))
    if isinstance(value, (IntervalSweep, RangeSweep)):
        return text.partition("=")[0] + "=" + str(value.start)
    return text


def is_missing_package(problem: str) -> bool:
    """Tell whether this is wrong only because a package is not installed here."""
    return any(
        find_spec(name) is None and re.search(rf"cannot import .*\b{name}\b|there is no module '{name}'|package {name} is not", problem)
        for name in EXTRAS
    )
