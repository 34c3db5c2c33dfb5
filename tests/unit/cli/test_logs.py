"""What a run has said, and says until it ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ddp_train.cli import logs
from ddp_train.launch.launcher import Launcher
from tests.unit.cli.runs import a_run, works_in

LAUNCHER = Launcher(run=lambda job: 99, slots=lambda folder, count: [])


def test_the_end_of_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    run_folder.rank_log(0).write_text("".join(f"line {number}\n" for number in range(5000)))
    assert logs.show_logs([str(tmp_path)], LAUNCHER) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "line 4999" and 100 < len(lines) < 5000


def test_it_goes_on_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_POLL_S", 0.05)
    run_folder = a_run(tmp_path)
    run_folder.rank_log(0).write_text("first\n")
    with works_in(run_folder) as process:
        follower = threading.Thread(target=logs.show_logs, args=(["-f", str(tmp_path)], LAUNCHER))
        follower.start()
        time.sleep(0.3)
        assert follower.is_alive()
        with run_folder.rank_log(0).open("a") as file:
            file.write("second\n")
        process.terminate()
        follower.join(timeout=10)
    assert not follower.is_alive()
    assert capsys.readouterr().out.splitlines() == ["first", "second"]
