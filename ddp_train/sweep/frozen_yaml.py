"""Copies of the YAML files that a sweep composes its jobs from.

A sweeper that decides as it goes composes for hours. A file that is edited meanwhile must not reach its later jobs.
"""

from __future__ import annotations

import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict, read_write

_MAX_FILES = 10_000  # below a folder of YAML; more are data


def freeze_yaml(loader: Any, base: DictConfig, folder: Path) -> None:
    """Make Hydra's loader read copies of the YAML files as they were when the sweep began.

    Args:
        loader: Hydra's, whose search path is changed.
        base: what the jobs are composed from; a search path in it is changed too.
        folder: where the copies lie. Those of an earlier attempt are used again.
    """
    for number, element in enumerate(loader.config_search_path.get_path()):
        element.path = _copy_yaml(element.path, folder / f"path_{number}")
    more = [_copy_yaml(path, folder / f"searchpath_{number}") for number, path in enumerate(base.hydra.searchpath)]
    loader.repository.initialize_sources(loader.config_search_path)
    if more:
        with read_write(base.hydra), open_dict(base.hydra):
            base.hydra.overrides.hydra.append(f"hydra.searchpath={more}")


def _copy_yaml(path: str, copied: Path) -> str:
    """Copy the YAML files below an element of Hydra's search path, unless that is done; return the element to use."""
    scheme, separator, original = path.partition("://")
    if not separator:
        scheme, original = "file", path
    if scheme != "file" or not Path(original).is_dir() or str(copied) == original:
        return path
    if not copied.exists():
        files = list(islice(Path(original).rglob("*"), _MAX_FILES + 1))
        if copied.is_relative_to(original) or len(files) > _MAX_FILES:
            why = "has too many files" if len(files) > _MAX_FILES else "has the sweep below it"
            print(f"{original} {why}, so no copy is kept: do not edit its YAML while the sweep runs", file=sys.stderr)
            return path
        unfinished = copied.with_name(f".{copied.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        for file in files:
            if file.suffix in (".yaml", ".yml"):
                target = unfinished / file.relative_to(original)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        unfinished.mkdir(parents=True, exist_ok=True)
        unfinished.rename(copied)
    return f"file://{copied}"
