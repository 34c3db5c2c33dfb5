"""What the doctor is asked with, and what it makes of the run's job. What it finds: tests/unit/doctor, tests/cluster/test_doctor.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_train.cli import doctor
from ddp_train.config.targets.locate import locate
from ddp_train.errors import ConfigError
from ddp_train.launch.engine.slurm_script import batch_script
from ddp_train.launch.job import Job, RankProgram
from ddp_train.launch.job_runner import JobRunner
from ddp_train.launch.submit import spec_of
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import write_json
from tests.fake_runner import FakeRunner
from tests.unit.parts import checked


def runner(run: Callable[[Job], int]) -> JobRunner:
    return FakeRunner(run)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Give the job that is composed, of SLURM, after another run."""
    config = checked("cluster=slurm", "cluster.device=cpu", "cluster.walltime='12:00:00'", "after=first", base=["model=mlp"])
    job = Job(config=config, run_folder=RunFolder(tmp_path / "run"), command=[], overrides=[])
    job.run_folder.root.mkdir()

    def compose_and_run(words: list[str], runner: JobRunner, *, change: Callable[[Job], Job]) -> int:
        job.overrides[:] = words
        return runner.run_to_end(change(job))

    monkeypatch.setattr(doctor, "compose_and_run", compose_and_run)
    monkeypatch.setattr(doctor, "_SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["ddp-train", "doctor"])
    return job


@pytest.mark.parametrize("word", ["-m", "--multirun", "resume=outputs/x"])
def test_it_is_of_one_run_that_is_to_come(word: str) -> None:
    with pytest.raises(ConfigError, match="the machines of one planned run"):
        doctor.examine([word], runner(lambda job: 1))


@pytest.mark.parametrize(("words", "kind"), [(["cluster=cpu"], "quick"), (["--full", "cluster=cpu"], "full")])
def test_ranks_are_given_its_program_and_what_the_run_would_be_given(words: list[str], kind: str, job: Job) -> None:
    seen: list[Job] = []
    doctor.examine(words, runner(lambda job: seen.append(job) or 0))  # type: ignore[func-returns-value]
    assert seen[0].overrides == ["cluster=cpu", "resume=never"]
    assert (seen[0].work, seen[0].is_resumable) == (RankProgram(function=f"ddp_train.doctor.checkup.{kind}"), False)
    assert callable(locate(f"ddp_train.doctor.checkup.{kind}"))


def test_slurm_is_given_a_short_job_that_comes_after_nothing_and_is_never_requeued(job: Job) -> None:
    seen: list[Job] = []
    doctor.examine([], runner(lambda job: seen.append(job) or 0))  # type: ignore[func-returns-value]
    spec = spec_of(seen[0], None)
    script = batch_script([spec]).splitlines()
    assert spec.engine_options["after"] == [] and spec.job.config.cluster.wait
    assert "#SBATCH --time=0-00:05:00" in script
    assert "#SBATCH --no-requeue" in script


@pytest.mark.parametrize(("code", "report", "expected"), [(0, 0, 0), (0, 78, 78), (0, None, 78), (1, None, 1), (78, 78, 78)])
def test_it_ends_with_the_code_of_the_report_and_leaves_nothing(job: Job, code: int, report: int | None, expected: int) -> None:
    def run(job: Job) -> int:
        if report is not None:
            write_json(job.run_folder.doctor, {"exit_code": report})
        return code

    assert doctor.examine([], runner(run)) == expected
    assert list(job.run_folder.root.iterdir()) == []
