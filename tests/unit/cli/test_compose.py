"""What Hydra gives to a callback and then to a job is checked once, but for what may have changed between the two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_train.cli import compose
from ddp_train.cli import main as app
from ddp_train.launch.job import Job
from tests.fake_runner import FakeRunner


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each check of a whole configuration."""
    made: list[Any] = []
    check = compose.check_in_torch_process

    def counted(*given: Any, **named: Any) -> Any:
        made.append(given)
        return check(*given, **named)

    monkeypatch.setattr(compose, "check_in_torch_process", counted)
    return made


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> list[Job]:
    jobs: list[Job] = []

    def take(job: Job) -> int:
        jobs.append(job)
        return 0

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ddp-train", *words])
    assert app.run(sys.argv[1:], FakeRunner(take)) == 0
    return jobs


def test_a_single_run_is_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checks: list[Any]) -> None:
    (job,) = run(monkeypatch, tmp_path, "model=mlp", "cluster=cpu", "trainer.max_steps=7")
    assert job.config.trainer.max_steps == 7
    assert len(checks) == 1


def test_what_a_config_has_of_the_run_folder_is_checked_when_that_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checks: list[Any]
) -> None:
    (job,) = run(monkeypatch, tmp_path, "model=mlp", "cluster=cpu", "hydra.run.dir=here", "+extra.place=${hydra:runtime.output_dir}")
    assert job.config.tree["extra"]["place"] == str(tmp_path / "here")
    assert len(checks) == 2
