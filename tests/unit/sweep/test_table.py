"""What became of the jobs of a sweep for which nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.sweep import Sweep, SweepJob
from ddp_train.run_folder.verdict import mark_cancelled
from ddp_train.sweep.table import update


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    found = Sweep(root=tmp_path, command=[], is_planned=True)
    for number in range(7):
        found.jobs.append(SweepJob(number=number, folder=str(number), overrides=[], identity="", attempts=1))
        found.run_folder(found.jobs[-1]).launch.mkdir(parents=True)
        Submission(engine="slurm", id=f"7_{number}").write(found.run_folder(found.jobs[-1]))
    return found


def test_the_engine_and_the_folders_say_it_together(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {0: Stage.ENDED, 1: Stage.RUNNING, 2: Stage.QUEUED, 3: Stage.ENDED, 4: Stage.ENDED, 5: Stage.ENDED, 6: Stage.ENDED}
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=stages[int(id[2:])]))
    done, _, requeued, failed, cancelled, hopeless, _ = map(sweep.run_folder, sweep.jobs)
    Result(status=Status.COMPLETED, metrics={"last": {"eval/loss": 2.0}}).write(done.result)
    Result(status=Status.PREEMPTED).write(requeued.result)
    Result(status=Status.FAILED).write(failed.result)
    mark_cancelled(cancelled)
    Result(status=Status.FAILED, error="NoProgress: everything ended without a report", has_no_progress=True).write(hopeless.result)
    found = update(sweep, "eval/loss")
    assert [job.status for job in sweep.jobs] == ["completed", "running", "queued", "failed", "interrupted", "failed", "interrupted"]
    assert found.alive == {1, 2} and found.problems == [] and sweep.jobs[0].metric == 2.0


def test_an_engine_that_does_not_answer_is_named(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(id: str) -> State:
        raise EnvironmentRefuses(happened="SLURM does not answer")

    monkeypatch.setattr(slurm_client, "state", away)
    found = update(sweep, None)
    assert len(found.problems) == 7 and found.alive == set()
    assert found.problems[0] == "slurm, job 7_0: SLURM does not answer"
