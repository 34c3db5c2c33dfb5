"""Who writes where, while a command runs and afterwards."""

from __future__ import annotations

import os
import sys

import pytest

from ddp_train.__main__ import main
from ddp_train.cli import main as app


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
