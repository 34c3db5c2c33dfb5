"""Checkpoints that could not be saved are known before training."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_train.checkpoint.disk_space import probe
from ddp_train.errors import EnvironmentRefuses

MB = 10**6


def test_room_for_all_for_some_and_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(*, free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    folder = tmp_path / "checkpoints"
    disk(free=3 * MB)
    assert probe(folder, MB, wanted=3) == ""
    assert list(folder.iterdir()) == []
    assert "3.0 MB free" in (warning := probe(folder, MB, wanted=5)) and "5.0 MB may be needed for 5 more" in warning
    disk(free=2 * MB - 1)
    with pytest.raises(EnvironmentRefuses, match=r"(?s)2.0 MB free, and needs 2.0 MB: one takes 1.0 MB .*hydra.run.dir=FOLDER"):
        probe(folder, MB, wanted=3)
    (folder / "step_00000001").mkdir()  # of the attempt before
    assert "may be needed for 2 more" in probe(folder, MB, wanted=3)
    (folder / "step_00000002").mkdir()
    assert probe(folder, MB, wanted=3) == ""
    disk(free=MB - 1)
    with pytest.raises(EnvironmentRefuses):
        probe(folder, MB, wanted=3)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentRefuses, match="cannot be written: Not a directory"):
        probe(tmp_path / "file" / "checkpoints", MB, wanted=3)

    def fail(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    for call in ("fsync", "rename"):
        with monkeypatch.context() as context:
            context.setattr(os, call, fail)
            with pytest.raises(EnvironmentRefuses, match="cannot be written: Read-only file system"):
                probe(tmp_path, MB, wanted=3)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
