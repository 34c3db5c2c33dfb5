"""Sweeps whose jobs an engine runs, as they are typed; the engine is a queue where a test says what becomes of each job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddp_train.cli import main as app
from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.sweep import Sweep, SweepJob
from ddp_train.sweep import schedule
from ddp_train.sweep.hydra_jobs import Multirun
from tests.fake_runner import FakeRunner

SLURM = ["cluster=slurm", "cluster.device=cpu", "model=mlp", "hydra.sweep.dir=s"]


class Queue:
    """SLURM's commands: arrays that were submitted, and how far each task is."""

    def __init__(self) -> None:
        self.scripts: list[str] = []
        self.ended: set[str] = set()
        self.refuses: Exception | None = None

    def submit(self, arguments: list[str]) -> str:
        if self.refuses is not None:
            raise self.refuses
        self.scripts.append(Path(arguments[-1]).read_text())
        return str(len(self.scripts))

    def state(self, id: str) -> State:
        return State(stage=Stage.ENDED if id in self.ended else Stage.QUEUED)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Queue:
    found = Queue()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in ("submit", "state"):
        monkeypatch.setattr(slurm_client, name, getattr(found, name))
    monkeypatch.setattr(slurm_client, "most_tasks", lambda: 4)
    return found


@pytest.fixture
def type_(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ddp-train", *words])
        return app.run(sys.argv[1:], FakeRunner(lambda job: 99))

    return run


def ids(sweep: Path) -> list[str | None]:
    loaded = Sweep.load(sweep)
    found = [Submission.read(loaded.run_folder(job)) for job in loaded.jobs]
    return [each.id if each is not None else None for each in found]


def end(sweep: Path, queue: Queue, *statuses: Status) -> None:
    """End the first jobs of a sweep."""
    for number, status in enumerate(statuses):
        Result(status=status).write(RunFolder(sweep / str(number)).result)
        submission = Submission.read(RunFolder(sweep / str(number)))
        assert submission is not None
        queue.ended.add(submission.id)


def test_all_jobs_are_submitted_at_once_and_what_is_not_done_again(
    queue: Queue, type_: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type_("-m", *SLURM, "seed=1,2,3", "sweep.parallel_jobs=2") == 0
    said, sweep = capsys.readouterr().out, tmp_path / "s"
    assert "submitted as job 1: 3 jobs of s, 2 at a time" in said and "3 of 3 jobs are queued or running" in said
    assert "ddp-train runs s   ddp-train status s   ddp-train cancel s" in said
    assert ids(sweep) == ["1_0", "1_1", "1_2"] and "#SBATCH --array=0-2%2\n" in queue.scripts[0]
    specs = [Spec.read(RunFolder(sweep / str(number)).spec) for number in range(3)]
    assert len({spec.token for spec in specs}) == 3 and len({spec.code for spec in specs}) == 1

    end(sweep, queue, Status.COMPLETED, Status.FAILED)
    assert type_("runs", "s", "--json") == 1
    statuses = {row["folder"]: row["status"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert statuses == {"s/0": "completed", "s/1": "failed", "s/2": "queued"}
    assert type_("resume", "s") == 0
    assert ids(sweep) == ["1_0", "2", "1_2"] and "--array" not in queue.scripts[1]
    assert type_("resume", "s") == 0 and len(queue.scripts) == 2
    assert [job.attempts for job in Sweep.load(sweep).jobs] == [1, 2, 1]


def test_more_jobs_than_an_array_takes_and_jobs_that_ask_for_different_things_are_several_arrays(
    queue: Queue, type_: Callable[..., int], tmp_path: Path
) -> None:
    assert type_("-m", *SLURM, "seed=range(0,6)", "sweep.parallel_jobs=5") == 0
    assert ids(tmp_path / "s") == ["1_0", "1_1", "1_2", "1_3", "2_0", "2_1"]
    assert all("%2\n" in script for script in queue.scripts)  # five at a time, for two arrays
    assert (tmp_path / "s/launch/slurm_1.sbatch").exists()
    queue.scripts.clear()
    assert type_("-m", *SLURM[:-1], "hydra.sweep.dir=t", "cluster.nodes=1,2", "seed=1,2") == 0
    assert ids(tmp_path / "t") == ["1_0", "1_1", "2_0", "2_1"]
    assert ["--nodes=1\n" in queue.scripts[0], "--nodes=2\n" in queue.scripts[1]] == [True, True]


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError(happened="invalid partition"), 2), (EnvironmentRefuses(happened="AssocMaxSubmitJobLimit"), 78)]
)
def test_what_is_not_taken_is_submitted_later(
    queue: Queue, type_: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    queue.refuses = error
    assert type_("-m", *SLURM, "seed=1,2") == code
    said = capsys.readouterr()
    assert "2 of 2 jobs were not submitted; `ddp-train resume s` submits them" in said.err
    queue.refuses = None
    assert type_("resume", "s") == 0 and ids(tmp_path / "s") == ["1_0", "1_1"]


def test_a_part_that_was_taken_is_not_submitted_twice(
    queue: Queue, type_: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_alone(arguments: list[str]) -> str:
        queue.refuses = EnvironmentRefuses(happened="AssocMaxSubmitJobLimit") if queue.scripts else None
        return queue.submit(arguments)

    monkeypatch.setattr(slurm_client, "submit", first_alone)
    assert type_("-m", *SLURM, "seed=range(0,6)") == 78
    assert "2 of 6 jobs were not submitted" in capsys.readouterr().err
    monkeypatch.setattr(slurm_client, "submit", queue.submit)
    queue.refuses = None
    assert type_("resume", "s") == 0 and ids(tmp_path / "s") == ["1_0", "1_1", "1_2", "1_3", "2_0", "2_1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep.on_failure=stop"], "sweep.on_failure: is stop, but no process waits"),
        (["cluster.launcher=slurm,local"], "cluster.launcher: is slurm and local in one sweep"),
        (["cluster=ssh", "cluster.hosts=[a,b]", "sweep.parallel_jobs=2"], "sweep.parallel_jobs: is 2, but with cluster.launcher=ssh"),
    ],
)
def test_what_a_sweep_on_an_engine_cannot_do_is_refused(
    queue: Queue, type_: Callable[..., int], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert type_("-m", *(word for word in SLURM if not word.startswith("cluster=") or words[0] != "cluster=ssh"), "seed=1,2", *words) == 2
    assert said in capsys.readouterr().err and queue.scripts == []


def test_within_a_job_of_slurm_it_is_refused(
    queue: Queue, type_: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert type_("-m", *SLURM, "seed=1,2") == 2
    assert "this command runs in job 7: a sweep submits its own jobs" in capsys.readouterr().err


def test_resume_asks_first_what_the_engine_has(
    queue: Queue, type_: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type_("-m", *SLURM, "seed=1,2") == 0

    def away(id: str) -> State:
        raise EnvironmentRefuses(happened="SLURM does not answer")

    monkeypatch.setattr(slurm_client, "state", away)
    assert type_("resume", "s") == 78 and len(queue.scripts) == 1
    assert "the engine does not report which jobs run" in capsys.readouterr().err


def test_after_a_restart_a_job_runs_on_that_failed_only_because_the_others_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"0": Status.FAILED, "1": Status.RUNNING}  # by sweep.json
    entries = [SweepJob(number=int(name), folder=name, overrides=[], identity=name, status=status) for name, status in said.items()]
    sweep = Sweep(root=tmp_path, command=[], jobs=entries)
    for entry in entries:
        sweep.run_folder(entry).root.mkdir()
        Result(status=Status.FAILED, error="rank 1: the connection to rank 0 was closed").write(sweep.run_folder(entry).result)
    run = list[int]()
    monkeypatch.setattr(Multirun, "run", lambda multirun, jobs: run.extend(entry.number for entry, _ in jobs))
    monkeypatch.setattr(schedule, "problems", lambda *given, **settings: [])
    Multirun(sweep, Mock(metric=None, direction=None), Mock(), Mock()).resume(lambda folder: Mock(), is_asked=False)
    assert run == [1]
