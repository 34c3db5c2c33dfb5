"""What a node remembers lives as long as its agent, and is this user's alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ddp_train.launch import restart_note


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary directory of the test's own, and return where memories are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ddp_train_{os.getuid()}"


def test_what_is_remembered_is_recalled_until_it_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart_note.recall_run() is None
    restart_note.remember_run(Path("/runs/one"))
    restart_note.remember_run(Path("/runs/two"))
    note = restart_note.recall_run()
    assert note == restart_note.RestartNote(continues_from=Path("/runs/two"), restarts=0, started=restart_note.STARTED)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restart_note.recall_run() == note
    restart_note.forget_run()
    assert restart_note.recall_run() is None
    assert list(folder.iterdir()) == []


def test_another_agents_memory_is_not_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restart_note.remember_run(Path("/runs/one"))
    (ours,) = folder.iterdir()
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert restart_note.recall_run() is None
    restart_note.remember_run(Path("/runs/of/another/agent"))
    assert ours in folder.iterdir()  # its agent lives


def test_a_folder_that_others_can_write_to_is_not_trusted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    restart_note.remember_run(Path("/runs/one"))
    assert "is not a folder of yours alone" in capsys.readouterr().err
    assert restart_note.recall_run() is None
    assert list(folder.iterdir()) == []
