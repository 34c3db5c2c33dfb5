"""The one line of a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.rank.restart import restart_line
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.process_env import is_last_attempt


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    for name in ("step_00000020", "step_00000040"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "COMPLETE").touch()
    (tmp_path / "checkpoints" / ".partial_step_00000060").mkdir()
    return RunFolder(tmp_path)


def test_the_line_names_the_rank_the_error_and_the_step(run_folder: RunFolder) -> None:
    failure.from_exception(ValueError("too\nlarge"), rank=1, step=47).record(run_folder)
    said = restart_line(run_folder, size=4, has_failed=True)
    assert said == "rank 1 failed (ValueError: too large); restart 1 of 3 from step 40"


def test_the_line_blames_nobody_who_only_lost_a_connection(run_folder: RunFolder) -> None:
    assert restart_line(run_folder, size=4, has_failed=True) == "a rank ended without a report; restart 1 of 3 from step 40"
    assert restart_line(run_folder, size=4, has_failed=False) == "the set of machines changed; 4 ranks continue from step 40"
    report = failure.from_exception(RuntimeError("connection closed"), rank=0, step=47)
    replace(report, kind=failure.FailureKind.CONNECTION).record(run_folder)
    assert restart_line(run_folder, size=4, has_failed=True).startswith("a rank ended without a report; ")


def test_earlier_reports_are_kept_and_numbered(run_folder: RunFolder) -> None:
    for number in (1, 2):
        failure.from_exit(rank=number, pid=5, exit_code=-9).record(run_folder)
        run_folder.archive_failure()
        assert json.loads((run_folder.root / f"failure.{number}.json").read_text())["rank"] == number
        assert not run_folder.failure.exists() and not run_folder.result.exists()


def test_only_the_last_attempt_shows_its_failure(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_last_attempt()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert is_last_attempt()


def test_a_rank_of_a_plain_run_imports_what_it_needs() -> None:
    """What a feature adds is imported by the run that asks for it. `ddp_train.rank.forked` is what the fork server imports."""
    names = "sweep_member command_group evaluate_job fault_injection finished_run predict replica_check other_steps micro_batch dry_build"
    names += " activation_checkpointing initial_weights"
    code = (
        "import sys, ddp_train.rank.main, ddp_train.rank.forked; "
        f"print(*(name for name in sys.modules if name.startswith('ddp_train') and name.rpartition('.')[2] in {names.split()}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
