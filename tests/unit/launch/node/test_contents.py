"""Two folders that differ are told apart, as far as `look_into` looks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddp_train.launch.node import contents
from ddp_train.launch.node.contents import Contents, look_into

MIB = 1 << 20


def look(path: Path) -> Contents:
    found = look_into(path, within_s=10)
    assert found is not None
    return found


def test_nothing_is_none_and_a_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    assert look_into(file, within_s=1) is None
    file.write_bytes(b"abc")
    assert look(file).sizes == {"": 3}
    before = look(file).samples
    file.write_bytes(b"abd")
    assert look(file).samples != before


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
    before = look(file).samples
    for place in (0, 64 * MIB - 1, (64 * MIB - contents._BLOCK_BYTES) * 7 // 15):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        assert look(file).samples != before, place
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\0")
    assert look(file).samples == before


def test_what_takes_too_long_is_left_out_and_said(tmp_path: Path) -> None:
    for number in range(contents._MOST_NAMES + 5):
        (tmp_path / f"{number:05}").touch()
    started = time.monotonic()
    found = look(tmp_path)
    assert time.monotonic() - started < 2
    assert (len(found.sizes), found.is_whole) == (contents._MOST_NAMES, False)
    assert len(found.samples) == contents._MOST_SAMPLED
    assert not look_into(tmp_path, within_s=0).is_whole  # type: ignore[union-attr]


def test_a_folder_of_very_many_is_not_listed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_MOST_IN_A_FOLDER", 3)
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
    assert set(found.samples) == {"fine"}
