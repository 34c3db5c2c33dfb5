"""`ddp-train verify` names each damaged file of each checkpoint, and its exit code says whether there is one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_train.cli import verify as module
from ddp_train.cli.verify import verify
from ddp_train.errors import ConfigError
from tests.fake_runner import FakeRunner
from tests.unit.checkpoint.states import FILE, saved
from tests.unit.cli.runs import a_run

RUNNER = FakeRunner(lambda job: 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_folder = a_run(tmp_path)
    for step in (2, 4):
        saved(run_folder.checkpoints, step)
    return tmp_path


def test_whole_checkpoints_are_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify([str(run)], RUNNER) == 0
    shown = capsys.readouterr().out
    assert shown.count("whole  ") == 2 and "2 files, " in shown
    assert verify([str(run / "checkpoints/last"), "--json"], RUNNER) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["problems"] == [] and json.loads(line)["bytes"] > 0


def test_a_damaged_one_is_named_with_its_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / "step_00000002" / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (run / "checkpoints" / "step_00000004" / "COMPLETE").unlink()
    (run / "result.json").write_text('{"status"')
    assert verify([str(run)], RUNNER) == 1
    shown = capsys.readouterr().out
    assert f"{FILE} is damaged" in shown and "COMPLETE is missing" in shown and "result.json cannot be read" in shown
    assert verify([str(run / "checkpoints" / "step_00000004")], RUNNER) == 1


def test_what_has_no_checkpoint_is_refused(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.rename(run / path.name)
    with pytest.raises(ConfigError, match="has saved no checkpoint"):
        verify([str(run)], RUNNER)


def test_ctrl_c_waits_for_no_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, chunks = [], []

    def compare_files(folder: Path, files: dict[str, object], on_progress: Callable[[], None]) -> None:
        begun.append(files)
        if len(begun) == 1:
            raise KeyboardInterrupt
        for _ in range(20):
            time.sleep(0.02)
            on_progress()
            chunks.append(files)

    monkeypatch.setattr(module, "listed_files", lambda checkpoint: {str(number): {"bytes": 1} for number in range(100)})
    monkeypatch.setattr(module, "compare_files", compare_files)
    with pytest.raises(KeyboardInterrupt):
        verify([str(run)], RUNNER)
    assert len(begun) < 60 and len(chunks) < 200  # of 200 files and 4000 chunks: those that were begun meanwhile, and not to their end
