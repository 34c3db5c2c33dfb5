"""Which code of the user's is looked at: in a repository what git does not ignore, elsewhere what lies below."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_train.launch.node.source import Source, look_at_source


def look(snapshot: Path | None = None) -> tuple[Source, dict[str, str]]:
    """Return what is found, and the user's part of it."""
    found = look_at_source(snapshot, within_s=10)
    return found, {name: digest for name, digest in found.hashes.items() if not name.startswith("ddp_train/")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "part/other.py", ".venv/lib.py", "env/pyvenv.cfg", "env/lib.py", "part/notes.txt", "ignored.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "outputs/run/launch/code").mkdir(parents=True)
    (tmp_path / "outputs/run/launch/spec.json").touch()
    (tmp_path / "outputs/run/launch/code/mine.py").touch()
    return tmp_path


def test_without_a_repository_the_python_files_below_count(folder: Path) -> None:
    found, theirs = look()
    assert set(theirs) == {"mine.py", "part/other.py", "ignored.py"}
    assert (found.listed_by, found.is_whole) == ("folder", True)
    assert "ddp_train/launch/node/source.py" in found.hashes


def test_in_a_repository_what_git_ignores_does_not_count_and_the_rest_does_wherever_one_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".gitignore").write_text("ignored.py\noutputs\n.venv\nenv\n")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "part"], check=True)
    monkeypatch.chdir(folder / "part")
    found, theirs = look()
    assert set(theirs) == {"mine.py", "part/other.py"}
    assert found.listed_by == "git"
    (folder / "part/other.py").write_text("changed")
    assert look()[1]["part/other.py"] != theirs["part/other.py"]


def test_a_snapshot_stands_for_the_users_code(folder: Path) -> None:
    snapshot = folder / "outputs/run/launch/code"
    assert set(look(snapshot)[1]) == {"mine.py"}


def test_what_takes_too_long_is_left_out_and_said(folder: Path) -> None:
    found = look_at_source(None, within_s=0)
    assert not found.is_whole
    assert all(name.startswith("ddp_train/") for name in found.hashes)
