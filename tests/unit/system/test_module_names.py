"""A module that is named in a text is there, and one that has moved is missed at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_train.system.module_names import module_name, source_path


def test_a_name_that_no_longer_exists_fails_loudly() -> None:
    for gone in ("ddp_train.data.fork_server", "ddp_train.frozen.config", "ddp_train.rank.hang"):
        with pytest.raises(ModuleNotFoundError):
            module_name(gone)
        with pytest.raises(ModuleNotFoundError):
            source_path(gone)


def test_a_module_is_found_without_being_imported() -> None:
    before = set(sys.modules)
    assert module_name("ddp_train.launch.agent.elastic") == "ddp_train.launch.agent.elastic"
    assert "ddp_train.launch.agent.elastic" not in set(sys.modules) - before
    assert source_path("ddp_train.rank.stop") == "ddp_train/rank/stop.py"
    assert source_path("ddp_train.data") == "ddp_train/data/"
    assert Path(module_name.__code__.co_filename).as_posix().endswith(source_path("ddp_train.system.module_names"))
