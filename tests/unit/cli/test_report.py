from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ddp_train.cli import report as module
from ddp_train.cli.report import report
from ddp_train.errors import ConfigError
from ddp_train.system import folder_lock
from tests.fake_runner import FakeRunner
from tests.unit.archive.report.run_files import write_lines, write_run, write_sweep

RUNNER = FakeRunner(lambda job: 99)


def test_the_page_lies_in_the_folder_that_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sweep = write_run(tmp_path / "run"), write_sweep(tmp_path / "sweep")
    assert report([str(run)], RUNNER) == 0 and (run / "report.html").stat().st_size < 300_000
    assert report([str(sweep), f"--figures={tmp_path / 'figures'}"], RUNNER) == 0 and (sweep / "report.html").exists()
    shown = capsys.readouterr().out
    assert "1 run, " in shown and "6 runs, " in shown and "5 figures as SVG" in shown
    assert report([str(run), str(sweep), f"--out={tmp_path / 'all.html'}"], RUNNER) == 0
    assert "7 runs, " in capsys.readouterr().out


def test_what_is_no_run_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="neither a run folder nor"):
        report([str(run / "logs")], RUNNER)
    with pytest.raises(OSError, match=r"File exists: .*config\.yaml"):  # which main shows in words
        report([str(run), f"--out={run}/config.yaml/page.html"], RUNNER)


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    write_lines(run / "metrics.jsonl", [])
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    folder_lock.lock(run, key="RUN")
    watching = threading.Thread(target=report, args=([str(run), "--watch"], RUNNER))
    watching.start()
    while not (run / "report.html").exists():
        time.sleep(0.01)
    first = (run / "report.html").read_text()
    (run / "metrics.jsonl").write_text(whole)
    assert watching.is_alive()
    folder_lock.unlock_all()
    watching.join(20)
    assert not watching.is_alive() and len((run / "report.html").read_text()) > len(first)


def test_a_long_run_stays_within_300_kb(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", steps=10_000)
    assert report([str(long)], RUNNER) == 0 and (long / "report.html").stat().st_size < 300_000


def test_a_folder_of_runs_is_taken_and_its_title_is_short(tmp_path: Path) -> None:
    for number in range(5):
        write_run(tmp_path / "outputs" / str(number), seed=number)
    assert report([str(tmp_path / "outputs")], RUNNER) == 0
    assert "<title>5 runs: outputs/0, outputs/1 and 3 more" in (tmp_path / "outputs/report.html").read_text()
