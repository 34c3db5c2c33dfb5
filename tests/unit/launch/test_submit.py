"""From a job to what an engine is given, and whether one may be given again; an engine as a slot of a sweep."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.launch import submit
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Engine, Rendered, Stage, State, Submission
from ddp_train.launch.job import Job
from ddp_train.launch.source_copy import Code
from ddp_train.launch.spec import Spec
from ddp_train.launch.submit import EngineSlot
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.verdict import mark_cancelled, verdict_after_end
from tests.unit.launch.engine.specs import spec
from tests.unit.parts import checked


def a_job(run: Path, *overrides: str) -> Job:
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
    spec = submit.spec_of(a_job(tmp_path, *overrides), None)
    assert (spec.engine, spec.processes, spec.min_nodes) == ("slurm", processes, least)
    assert spec.job.config.batch.world_size == sum(processes)


def test_the_signal_leaves_time_for_a_step_as_long_as_the_newest(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"split": "train", "step": 4, "step_ms": 2500.0}\n{"split": "eval"}\n{"step_ms": 9')
    assert submit.spec_of(a_job(tmp_path), None).engine_options["step_s"] == 2.5
    (tmp_path / "metrics.jsonl").unlink()
    assert submit.spec_of(a_job(tmp_path), None).engine_options["step_s"] == 0.0


@pytest.fixture
def before(tmp_path: Path) -> RunFolder:
    (tmp_path / "before").mkdir()
    (tmp_path / "before/config.yaml").touch()
    return RunFolder(tmp_path / "before")


def test_a_run_waits_for_the_jobs_of_those_before_it_that_are_not_done(tmp_path: Path, before: RunFolder) -> None:
    after = a_job(tmp_path, f"after={before.root}")
    with pytest.raises(ConfigError, match="not a job of slurm"):
        submit.spec_of(after, None)
    Submission(engine="slurm", id="17_3").write(before)
    assert submit.spec_of(after, None).engine_options["after"] == ["17_3"]
    Result(status=Status.COMPLETED).write(before.result)
    assert submit.spec_of(after, None).engine_options["after"] == []


def test_a_run_after_one_whose_job_has_ended_is_refused(
    tmp_path: Path, before: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submitted(spec: object) -> None:
        raise AssertionError("it is not")

    Submission(engine="slurm", id="17").write(before)
    monkeypatch.setattr(slurm_client, "allocation", lambda: None)
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.ENDED, why="failed"))
    monkeypatch.setattr(slurm_client, "submit", submitted)
    monkeypatch.setattr(submit.source_copy, "copy_source", lambda into, limit_mib: None)
    after = a_job(tmp_path / "after", f"after={before.root}")
    after.run_folder.root.mkdir()
    assert submit.submit_job(after) == 2
    said = capsys.readouterr().err
    assert "its job 17 has ended (failed)" in said and "ddp-train resume" in said
    monkeypatch.setattr(slurm_client, "allocation", lambda: "17")
    assert submit.submit_job(after) == 2
    said = capsys.readouterr().err
    assert "job 17 is not done, and allocation 17 would wait idle" in said and "ddp-train ... && ddp-train resume" in said
    after.run_folder.environment.touch()  # it has begun once
    assert submit.spec_of(after, None).engine_options["after"] == []


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
    with pytest.raises(ConfigError, match="cannot find out whether"):
        submit.require_ended(before.root)


def test_what_goes_wrong_at_the_engine_says_how_to_submit_it_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "run").mkdir()
    assert submit.submit_job(a_job(tmp_path / "run")) == 2
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


class FakeEngine(Engine):
    """A queue whose jobs are where a test says; it notes what it is asked for."""

    has_queue = True

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        self.called: list[str] = []
        self.refuses: Exception | None = None
        self.is_away = False

    def render(self, specs: Sequence[Spec]) -> Rendered:
        return Rendered(files={}, commands=[], run_folders=[each.job.run_folder.root for each in specs])

    def submit(self, rendered: Rendered) -> str:
        self.called.append("submit")
        if self.refuses is not None:
            raise self.refuses
        id = str(len(self.stages) + 1)
        self.stages[id] = Stage.QUEUED
        for root in rendered.run_folders:
            Submission(engine="slurm", id=id).write(RunFolder(root))
        return id

    def state(self, id: str) -> State:
        if self.is_away:
            raise EnvironmentRefuses(happened="SLURM does not answer")
        return State(stage=self.stages[id])

    def stop(self, id: str, *, at_once: bool = False) -> None:
        self.called.append(f"stop {id}{' at once' if at_once else ''}")

    def follow(self, run_folder: RunFolder, id: str) -> int:
        return 99


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(submit, "engine_of", lambda name: fake)
    for name in ("_ASK_EVERY_S", "_ASK_SOON_S", "_SUBMIT_EVERY_S"):
        monkeypatch.setattr(submit, name, 0.0)
    return fake


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = spec(tmp_path / "sweep/0").job
    found.run_folder.logs.mkdir(parents=True)
    return found


def a_slot() -> EngineSlot:
    return EngineSlot(lambda limit_mib: Code(folder="/code", hash="0" * 64))


def started(job: Job) -> EngineSlot:
    found = a_slot()
    found.start(job)
    return found


def test_a_job_is_given_once_and_ends_as_its_verdict_says(engine: FakeEngine, job: Job) -> None:
    place = started(job)
    assert place.poll(0) is None and Spec.read(job.run_folder.spec).code == Code(folder="/code", hash="0" * 64)
    engine.stages["1"] = Stage.RUNNING
    assert place.poll(0) is None
    Result(status=Status.COMPLETED).write(job.run_folder.result)
    assert place.poll(0) is None  # it may still save, or leave: the engine has the last word
    engine.stages["1"] = Stage.ENDED
    assert place.poll(0) == 0
    assert engine.called == ["submit"]


def test_an_engine_of_somebodys_own_is_one_module(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("mine")
    module.ENGINE = mine = FakeEngine()  # type: ignore[attr-defined]
    mine.has_queue = False
    monkeypatch.setitem(sys.modules, "ddp_train.launch.engine.mine", module)
    monkeypatch.setattr(submit.source_copy, "copy_source", lambda into, limit_mib: None)
    cluster = replace(job.config.cluster, launcher="mine", wait=True)  # type: ignore[arg-type]
    assert submit.submit_job(replace(job, config=replace(job.config, cluster=cluster))) == 99
    assert mine.called == ["submit"] and "\nstarted as 1: " in f"\n{capsys.readouterr().out}"


def test_a_job_that_the_engine_has_is_taken_over(engine: FakeEngine, job: Job) -> None:
    started(job)
    written = job.run_folder.spec.read_bytes()
    place = started(job)  # another command, after the first one was killed
    engine.stages["1"] = Stage.ENDED
    Result(status=Status.FAILED).write(job.run_folder.result)
    assert place.poll(0) == 1 and engine.called == ["submit"] and job.run_folder.spec.read_bytes() == written


def test_a_job_that_ends_without_a_word_has_failed_when_none_can_come(
    engine: FakeEngine, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "verdict_after_end", partial(verdict_after_end, within_s=0.0))
    place = started(job)
    engine.stages["1"] = Stage.ENDED  # its machine is lost
    assert place.poll(0) == 1
    place = started(job)
    engine.stages["2"] = Stage.ENDED
    Result(status=Status.PREEMPTED, step=3).write(job.run_folder.result)
    assert place.poll(0) == 75


def test_a_job_that_has_ended_is_given_again_unless_it_is_completed(engine: FakeEngine, job: Job) -> None:
    started(job)
    engine.stages["1"] = Stage.ENDED
    mark_cancelled(job.run_folder)
    started(job)
    assert engine.called == ["submit", "submit"] and not job.run_folder.cancelled.exists()
    engine.stages["2"] = Stage.ENDED
    Result(status=Status.COMPLETED).write(job.run_folder.result)
    assert started(job).poll(0) == 0 and engine.called == ["submit", "submit"]


def test_while_an_engine_is_away_nothing_is_given_and_nothing_has_ended(
    engine: FakeEngine, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    place = started(job)
    engine.is_away = True
    assert place.poll(0) is None
    later = started(job)
    assert [later.poll(0) for _ in range(3)] == [None] * 3 and engine.called == ["submit"]
    assert capsys.readouterr().err.count("SLURM does not answer") == 1
    engine.is_away = False
    engine.stages["1"] = Stage.ENDED
    Result(status=Status.COMPLETED).write(job.run_folder.result)
    assert [later.poll(0), later.poll(0)] == [None, 0] and engine.called == ["submit"]


def test_a_full_queue_is_fed_when_there_is_room(engine: FakeEngine, job: Job) -> None:
    engine.refuses = EnvironmentRefuses(happened="QOSMaxSubmitJobPerUserLimit")
    place = started(job)
    assert [place.poll(0), place.poll(0)] == [None, None]
    engine.refuses = None
    assert place.poll(0) is None and Submission.read(job.run_folder) is not None
    engine.refuses = ConfigError(happened="invalid partition")
    engine.stages["1"] = Stage.ENDED
    with pytest.raises(ConfigError, match="invalid partition"):
        started(job)


@pytest.mark.parametrize(
    ("signals", "code", "called", "is_cancelled"),
    [
        ([signal.SIGTERM], 75, [], False),  # the job goes on
        ([signal.SIGHUP], 75, [], False),
        ([signal.SIGINT], None, ["stop 1"], True),
        ([signal.SIGINT, signal.SIGKILL], None, ["stop 1 at once"], True),
    ],
)
def test_only_a_person_ends_what_is_in_a_queue(
    engine: FakeEngine, job: Job, signals: list[int], code: int | None, called: list[str], is_cancelled: bool
) -> None:
    place = started(job)
    for number in signals:
        place.stop(number)
    assert [place.poll(0), place.poll(0)] == [code, code]
    assert engine.called == ["submit", *called] and job.run_folder.cancelled.exists() == is_cancelled


def test_what_was_not_given_yet_is_not_waited_for(engine: FakeEngine, job: Job) -> None:
    engine.refuses = EnvironmentRefuses(happened="full")
    place = started(job)
    place.stop(signal.SIGINT)
    assert place.poll(0) == 130


def test_the_slots_of_a_sweep_share_one_copy_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    one, two = submit.slots(tmp_path / "sweep", 2)
    first = one._take_code(100)
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert two._take_code(100) == first and first.folder.startswith(f"{tmp_path}/sweep/launch/code_")
    later = submit.slots(tmp_path / "sweep", 1)[0]._take_code(100)
    assert later.folder != first.folder and (Path(first.folder) / "mine.py").read_text() == "x = 1\n"
    assert sorted(path.name for path in (tmp_path / "sweep/launch").iterdir() if path.is_dir()) == sorted(
        [Path(first.folder).name, Path(later.folder).name]
    )
