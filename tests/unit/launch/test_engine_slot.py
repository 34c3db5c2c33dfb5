"""An engine as a slot of a sweep: a job is given to it once, found again by whoever comes later, and ended as people mean it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.job import Job
from ddp_train.launch import engine_slot as slot_module
from ddp_train.launch import submit
from ddp_train.launch.engine.engine import Rendered, Stage, State, Submission
from ddp_train.launch.engine_slot import EngineSlot
from ddp_train.launch.spec import Code, Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.verdict import mark_cancelled
from tests.unit.launch.engine.specs import spec


class FakeEngine:
    """A queue whose jobs are where a test says; it notes what it is asked for."""

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
    for module in (slot_module, submit):
        monkeypatch.setattr(module, "engine_of", lambda name: fake)
    for name in ("_ASK_EVERY_S", "_ASK_SOON_S", "_SUBMIT_EVERY_S"):
        monkeypatch.setattr(slot_module, name, 0.0)
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
    found.start(job, fresh=False)
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
    place = started(job)
    engine.stages["1"] = Stage.ENDED  # its machine is lost
    assert [place.poll(0), place.poll(0)] == [None, None]
    monkeypatch.setattr(slot_module, "WORD_WITHIN_S", 0.0)
    assert place.poll(0) == 1
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
    one, two = slot_module.slots(tmp_path / "sweep", 2)
    first = one._take_code(100)
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert two._take_code(100) == first and first.folder.startswith(f"{tmp_path}/sweep/launch/code_")
    later = slot_module.slots(tmp_path / "sweep", 1)[0]._take_code(100)
    assert later.folder != first.folder and (Path(first.folder) / "mine.py").read_text() == "x = 1\n"
    assert sorted(path.name for path in (tmp_path / "sweep/launch").iterdir() if path.is_dir()) == sorted(
        [Path(first.folder).name, Path(later.folder).name]
    )
