"""Who writes where, while a command runs and afterwards."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
from pathlib import Path

import pytest

from ddp_train.__main__ import main
from ddp_train.cli import main as app
from ddp_train.system.terminal import Foot, free_foot


@pytest.fixture(autouse=True)
def puts_the_umask_back() -> object:
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def test_a_notebook_that_calls_main_has_its_own_streams_back(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        print("of the command")
        return 3

    monkeypatch.setattr(app, "main", run)
    streams = sys.stdout, sys.stderr
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 3
    assert (sys.stdout, sys.stderr) == streams
    assert capfd.readouterr().out == "of the command\n"


def test_an_error_that_nobody_expected_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise KeyError("hunter2hunter2")

    monkeypatch.setenv("MY_API_TOKEN", "hunter2hunter2")
    monkeypatch.setattr(app, "main", run)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    shown = capfd.readouterr().err
    assert "KeyError" in shown and "hunter2hunter2" not in shown


def test_the_foot_of_a_terminal_follows_its_height_and_is_given_back() -> None:
    ours, theirs = os.openpty()

    def has(lines: int) -> None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))

    def shown() -> str:
        return os.read(ours, 1 << 16).decode()

    has(30)
    foot = Foot(theirs, 3)
    foot.draw(["one", "two"])
    first = shown()
    assert "\x1b[1;27r" in first and "\x1b[28;1H\x1b[2Kone\x1b[29;1H\x1b[2Ktwo\x1b[30;1H\x1b[2K\x1b[?7h" in first
    foot.draw(["three"])
    assert "r" not in (again := shown()).replace("three", "") and "\x1b[28;1H\x1b[2Kthree" in again
    has(6)
    foot.draw(["one", "two"])
    assert "\x1b[r" in (small := shown()) and "\x1b[1;4r" in small and "\x1b[5;1H\x1b[2Kone\x1b[6;1H\x1b[2Ktwo" in small
    has(2)
    foot.draw(["one"])
    assert "one" not in shown(), "there is no room"
    free_foot(theirs)
    assert shown() == "\x1b7\x1b[r\x1b8\x1b[J"
    has(30)
    foot.draw(["one"])  # by a thread that has not ended yet
    os.close(theirs)
    with pytest.raises(OSError, match="Input/output error"):
        os.read(ours, 1)
    os.close(ours)


def test_what_is_no_terminal_has_no_foot(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    Foot(descriptor, 3).draw(["one"])
    free_foot(descriptor)
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b""
