"""From a job to what an engine is given; and whether one may be given again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.job import Job
from ddp_train.launch import submit
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.unit.parts import checked


def job(run: Path, *overrides: str) -> Job:
    config = checked("cluster=slurm", "cluster.device=cpu", *overrides, base=["model=mlp"])
    return Job(config=config, run_folder=RunFolder(run), command=[], overrides=[])


@pytest.mark.parametrize(
    ("overrides", "processes", "least"),
    [
        (["cluster.processes_per_node=null"], (2,), 1),
        (["cluster.nodes=2", "cluster.processes_per_node=4"], (4, 4), 2),
        (["cluster.nodes='1:3'", "cluster.device=cuda", "cluster.processes_per_node=1"], (1, 1, 1), 1),
    ],
)
def test_the_shape_of_a_run(tmp_path: Path, overrides: list[str], processes: tuple[int, ...], least: int) -> None:
    spec = submit.freeze(job(tmp_path, *overrides), None)
    assert (spec.engine, spec.processes, spec.min_nodes) == ("slurm", processes, least)
    assert spec.job.config.batch.world_size == sum(processes)


def test_the_signal_leaves_time_for_the_longest_of_the_newest_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step_ms": 1500}\n{"split": "eval"}\n{"step_ms": 2500.0}\n{"step_ms": 9')
    assert submit.freeze(job(tmp_path), None).engine_options["step_s"] == 2.5
    (tmp_path / "metrics.jsonl").unlink()
    assert submit.freeze(job(tmp_path), None).engine_options["step_s"] == 0.0


@pytest.fixture
def before(tmp_path: Path) -> RunFolder:
    (tmp_path / "before").mkdir()
    (tmp_path / "before/config.yaml").touch()
    return RunFolder(tmp_path / "before")


def test_a_run_waits_for_the_jobs_of_those_before_it_that_are_not_done(tmp_path: Path, before: RunFolder) -> None:
    after = job(tmp_path, f"after={before.root}")
    with pytest.raises(ConfigError, match="no job of slurm"):
        submit.freeze(after, None)
    Submission(engine="slurm", id="17_3").write(before)
    assert submit.freeze(after, None).engine_options["after"] == ["17_3"]
    Result(status=Status.COMPLETED).write(before.result)
    assert submit.freeze(after, None).engine_options["after"] == []


def test_a_run_after_one_whose_job_has_ended_is_refused(
    tmp_path: Path, before: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submitted(spec: object) -> None:
        raise AssertionError("it is not")

    Submission(engine="slurm", id="17").write(before)
    monkeypatch.setattr(slurm_client, "allocation", lambda: None)
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.ENDED, why="failed"))
    monkeypatch.setattr(slurm_client, "submit", submitted)
    monkeypatch.setattr(submit.snapshot, "take", lambda into, limit_mib: None)
    after = job(tmp_path / "after", f"after={before.root}")
    after.run_folder.root.mkdir()
    assert submit.run(after) == 2
    said = capsys.readouterr().err
    assert "its job 17 has ended (failed)" in said and "ddp-train resume" in said
    monkeypatch.setattr(slurm_client, "allocation", lambda: "17")
    assert submit.run(after) == 2
    said = capsys.readouterr().err
    assert "job 17 is not done, and allocation 17 would be held for nothing" in said and "ddp-train ... && ddp-train resume" in said
    after.run_folder.environment.touch()  # it has begun once
    assert submit.freeze(after, None).engine_options["after"] == []


def test_a_run_that_is_queued_is_not_submitted_again(before: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    submit.require_ended(before.root)
    Submission(engine="slurm", id="17").write(before)
    for stage in (Stage.QUEUED, Stage.RUNNING):
        monkeypatch.setattr(slurm_client, "state", lambda id, stage=stage: State(stage=stage))
        with pytest.raises(ConfigError, match=f"{stage} as job 17"):
            submit.require_ended(before.root)
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.ENDED))
    submit.require_ended(before.root)

    def away(id: str) -> State:
        raise EnvironmentRefuses(happened="SLURM does not answer")

    monkeypatch.setattr(slurm_client, "state", away)
    with pytest.raises(ConfigError, match="nobody knows"):
        submit.require_ended(before.root)


def test_what_goes_wrong_at_the_engine_says_how_to_submit_it_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "run").mkdir()
    assert submit.run(job(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "sbatch is not on this machine" in said and "ddp-train resume run" in said


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["cluster.device=auto"], "cluster.device"), (["cluster.device=cuda"], "cluster.processes_per_node")],
)
def test_the_machines_of_a_job_are_not_this_one(overrides: list[str], key: str) -> None:
    with pytest.raises(Exception, match=f"{key}: ") as refused:
        checked("cluster=slurm", "cluster.processes_per_node=null", *overrides, base=["model=mlp"])
    assert "machines" in str(refused.value) or "machine cannot know" in str(refused.value)


def test_the_section_has_no_default_of_its_own() -> None:
    cluster = checked("cluster=slurm_a100", base=["model=mlp"]).cluster
    assert isinstance(cluster, ClusterConfig) and cluster.slurm.exclusive and cluster.slurm.options == {"mem": 0}
    with pytest.raises(Exception, match=r"did you mean cluster\.slurm\.partition=gpu"):
        checked("cluster=slurm_a100", "+cluster.slurm.partiton=gpu", base=["model=mlp"])
