"""Jobs from what was composed before: the frozen config in a run folder, and nothing else. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddp_train import config, diagnose
from ddp_train.boundary import require_own
from ddp_train.checkpoint_policy import is_name, require_candidates
from ddp_train.errors import ConfigError
from ddp_train.job import Job
from ddp_train.run_dir import RunDir


def frozen_job(folder: Path, overrides: list[str], *, in_sweep: bool = False, checkpoint: str | None = None) -> Job:
    """Make a job of a run folder: its own frozen config, with single values changed."""
    require_own(folder, key="resume")
    saved = saved_config(folder)
    diagnose.refuse_unknown(overrides, saved)
    tree = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(saved), OmegaConf.from_dotlist(overrides)))
    assert isinstance(tree, dict)
    first = folder / ".hydra" / "overrides.yaml"
    return Job(
        config=config.load({str(name): value for name, value in tree.items()}),
        run_dir=RunDir(folder),
        command=list(sys.argv),
        overrides=[*(config.texts(OmegaConf.load(first)) if first.exists() else []), *overrides],
        in_sweep=in_sweep,
        checkpoint=checkpoint,
    )


def run_of(path: Path) -> Path:
    """Return the run folder of a run folder or of one of its checkpoints, which can also be called `best` or `last`.

    Raises:
        ConfigError: it is none, or no checkpoint has the name.
    """
    if is_name(path):
        require_candidates(path, key="resume")
    for folder in (path, path.parent.parent):
        if (path.exists() or is_name(path)) and (folder / "config.yaml").exists():
            return folder.absolute()
    raise ConfigError(
        key="resume", happened=f"{path} is no run folder and no checkpoint", expected="a folder that holds config.yaml, or sweep.json"
    )


def saved_config(folder: Path) -> dict[str, Any]:
    """Return the config.yaml of a run folder."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except Exception as error:  # OSError, or what the YAML parser raises
        raise ConfigError(key="resume", happened=f"{folder}/config.yaml cannot be read: {error}") from None
    if not isinstance(saved, dict) or not saved:
        raise ConfigError(key="resume", happened=f"{folder}/config.yaml holds no configuration")
    return {str(name): value for name, value in saved.items()}
