"""Every damage has a name, and makes a checkpoint none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from ddp_train.checkpoint.folder import newest_good
from ddp_train.checkpoint.verify import verify
from tests.unit.checkpoint.states import FILE, forge, saved


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    f"{FILE} is damaged": lambda path: flip(path / FILE),
    f"{FILE} has 10 bytes instead of": lambda path: os.truncate(path / FILE, 10),
    f"{FILE} is missing": lambda path: (path / FILE).unlink(),
    f"{FILE} cannot be opened": lambda path: replace(path / FILE, lambda link: link.symlink_to("/etc/hostname")),
    f"{FILE} is not a plain file": lambda path: replace(path / FILE, os.mkfifo),
    "other.bin is not in manifest.json": lambda path: (path / "other.bin").touch(),
    "COMPLETE is missing": lambda path: (path / "COMPLETE").unlink(),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is damaged": lambda path: flip(path / "manifest.json"),
    "manifest.json cannot be read": lambda path: forge(path, files=3),
    "manifest.json is of format 3": lambda path: forge(path, format=3),
    "manifest.json is of step 7": lambda path: forge(path, step=7),
    "'../step_00000001/COMPLETE' is no name": lambda path: forge(
        path,
        files={"../step_00000001/COMPLETE": {"bytes": 1, "xxh3_128": ""}}
        | {FILE: {"bytes": (path / FILE).stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest((path / FILE).read_bytes())}},
    ),
    "step_00000002 is not a folder": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    DAMAGES[said](bad)
    assert newest_good(tmp_path) == good
    (refused,) = capsys.readouterr().out.splitlines()
    assert said in refused
    assert "step_00000002" in refused


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    os.chown(path / FILE, 12345, -1)
    assert verify(path) == f"{FILE} belongs to the user with number 12345"
