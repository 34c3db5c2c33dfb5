"""A run that goes on is asked to record; one that does not is not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ddp_train.cli.profile import profile
from ddp_train.errors import ConfigError
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.run_folder.paths import ProfileRequest, RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.sweep import Sweep, SweepJob
from tests.fake_runner import FakeRunner
from tests.unit.cli.runs import a_run, works_in

RUNNER = FakeRunner(lambda job: 99)


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Give the folder of a run that an engine has."""
    run_folder = a_run(tmp_path / "run", "trainer.log_every_steps=25")
    Submission(engine="slurm", id="17").write(run_folder)
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.RUNNING))
    return run_folder


@pytest.mark.parametrize("words", [["--steps=3", "--ranks=0,2", "--kind=memory"], ["--steps", "3", "--ranks", "[0,2]", "--kind", "memory"]])
def test_what_is_typed_is_asked(queued: RunFolder, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert profile([str(queued.root), *words], RUNNER) == 0
    assert ProfileRequest.pop(queued) == ProfileRequest(kind="memory", steps=3, ranks=[0, 2])
    assert capsys.readouterr().out.startswith("requested: 3 steps on rank 0, 2, after the next training record (one every 25 steps); into ")


def test_without_options_it_is_what_the_run_says(queued: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile([str(queued.root)], RUNNER) == 0
    assert ProfileRequest.pop(queued) == ProfileRequest()
    assert "requested: 5 steps on rank 0, " in capsys.readouterr().out


def test_a_run_of_this_machine_is_asked_too(tmp_path: Path) -> None:
    run_folder = a_run(tmp_path)
    with works_in(run_folder) as process:
        assert profile([str(tmp_path)], RUNNER) == 0
        with pytest.raises(ConfigError, match="was requested already"):
            profile([str(tmp_path)], RUNNER)
        process.send_signal(signal.SIGTERM)
    assert run_folder.profile_request.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no run folder was given"),
        (["RUN", "other"], "no run folder was given"),
        (["RUN", "--step=3"], "--step=3 is not an option"),
        (["RUN", "--steps"], "--steps has no value"),
        (["RUN", "--steps=0"], "not a number of at least 1"),
        (["RUN", "--steps=many"], "'many' is not a number"),
        (["RUN", "--ranks=0,x"], "invalid literal for .*'x'"),
        (["RUN", "--kind=time"], "kind is 'time'"),
    ],
)
def test_a_mistake_is_named(queued: RunFolder, words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        profile([str(queued.root) if word == "RUN" else word for word in words], RUNNER)
    assert not queued.profile_request.exists()


def test_who_takes_no_steps_is_not_asked(tmp_path: Path) -> None:
    run_folder = a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="no process is training in"):
        profile([str(run_folder.root)], RUNNER)
    Result(status=Status.COMPLETED, step=100).write(run_folder.result)
    with pytest.raises(ConfigError, match="is done"):
        profile([str(run_folder.root)], RUNNER)
    evaluation = a_run(tmp_path / "evaluation")
    evaluation.task.write_text("{}")
    with pytest.raises(ConfigError, match="an evaluation"):
        profile([str(evaluation.root)], RUNNER)
    with pytest.raises(ConfigError, match="neither a run folder"):
        profile([str(tmp_path)], RUNNER)


def test_a_job_of_a_sweep_that_runs_is_asked_and_the_sweep_is_not(tmp_path: Path) -> None:
    job = a_run(tmp_path / "0")
    Sweep(root=tmp_path, command=[], jobs=[SweepJob(number=0, folder="0", overrides=[], identity="0")]).save()
    with pytest.raises(ConfigError, match="no process is training in"):
        profile([str(job.root)], RUNNER)
    with works_in(RunFolder(tmp_path)) as process:
        assert profile([str(job.root)], RUNNER) == 0
        with pytest.raises(ConfigError, match="the folder of a sweep"):
            profile([str(tmp_path)], RUNNER)
        process.send_signal(signal.SIGTERM)
    assert job.profile_request.exists()
