"""Two folders that differ are told apart, as far as they are looked at; of code what git does not ignore, elsewhere what lies below."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from ddp_train.launch.node_facts import file_list
from ddp_train.launch.node_facts.file_list import FileList, list_data, list_source

MIB = 1 << 20


def look(path: Path) -> FileList:
    found = list_data(path, within_s=10)
    assert found is not None
    return found


def test_nothing_is_none_and_a_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    assert list_data(file, within_s=1) is None
    file.write_bytes(b"abc")
    assert look(file).sizes == {"": 3}
    before = look(file).hashes
    file.write_bytes(b"abd")
    assert look(file).hashes != before


def test_names_and_sizes_of_everything_below_and_no_hidden_names(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.jpg").write_bytes(b"12")
    (tmp_path / "train" / ".part").write_bytes(b"half")
    found = look(tmp_path)
    assert found.sizes == {"train": -1, "train/cat": -1, "train/cat/1.jpg": 2}
    assert found.is_whole and not found.problem


def test_other_bytes_of_a_large_file_are_seen_at_its_ends_and_in_blocks_between(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(64 * MIB))
    before = look(file).hashes
    for place in (0, 64 * MIB - 1, (64 * MIB - file_list._BLOCK_BYTES) * 7 // 15):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        assert look(file).hashes != before, place
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\0")
    assert look(file).hashes == before


def test_what_takes_too_long_is_left_out_and_said(tmp_path: Path) -> None:
    for number in range(file_list._MAX_DATA_FILES + 5):
        (tmp_path / f"{number:05}").touch()
    started = time.monotonic()
    found = look(tmp_path)
    assert time.monotonic() - started < 2
    assert (len(found.sizes), found.is_whole) == (file_list._MAX_DATA_FILES, False)
    assert len(found.hashes) == file_list._MAX_SAMPLED
    assert not list_data(tmp_path, within_s=0).is_whole  # type: ignore[union-attr]


def test_a_folder_of_very_many_is_not_listed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_list, "_MAX_IN_A_FOLDER", 3)
    for number in range(3):
        (tmp_path / f"{number}").touch()
    assert look(tmp_path).is_whole
    (tmp_path / "3").touch()
    found = look(tmp_path)
    assert (len(found.sizes), found.is_whole) == (3, False)


def test_what_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    (tmp_path / "fine").write_bytes(b"1")
    found = look(tmp_path)
    assert "dangling cannot be read: No such file" in found.problem
    assert set(found.hashes) == {"fine"}


def source(source_copy: Path | None = None) -> tuple[FileList, dict[str, str]]:
    """Return what is found, and the user's part of it."""
    found = list_source(source_copy, within_s=10)
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
    (tmp_path / "outputs/run/.hydra").mkdir()
    (tmp_path / "outputs/run/launch/code/mine.py").touch()
    return tmp_path


def test_without_a_repository_the_python_files_below_count(folder: Path) -> None:
    found, theirs = source()
    assert set(theirs) == {"mine.py", "part/other.py", "ignored.py"}
    assert (found.listed_by, found.is_whole) == ("folder", True)
    assert "ddp_train/launch/node_facts/file_list.py" in found.hashes


def test_in_a_repository_what_git_ignores_does_not_count_and_the_rest_does_wherever_one_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".gitignore").write_text("ignored.py\noutputs\n.venv\nenv\n")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "part"], check=True)
    monkeypatch.chdir(folder / "part")
    found, theirs = source()
    assert set(theirs) == {"mine.py", "part/other.py"}
    assert found.listed_by == "git"
    (folder / "part/other.py").write_text("changed")
    assert source()[1]["part/other.py"] != theirs["part/other.py"]


def test_a_source_copy_stands_for_the_users_code(folder: Path) -> None:
    source_copy = folder / "outputs/run/launch/code"
    assert set(source(source_copy)[1]) == {"mine.py"}


def test_code_that_takes_too_long_is_left_out_and_said(folder: Path) -> None:
    found = list_source(None, within_s=0)
    assert not found.is_whole
    assert all(name.startswith("ddp_train/") for name in found.hashes)
