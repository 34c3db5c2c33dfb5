"""sweep.json, and what is taken over from the result.json of each job."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.sweep import Sweep, SweepJob, update_table
from ddp_train.sweep.table import show
from ddp_train.system.folder_lock import lock, unlock_all


def a_sweep(root: Path) -> Sweep:
    jobs = [SweepJob(number=number, folder=f"{number}", overrides=[f"seed={number}"], identity=f"{number}") for number in range(3)]
    return Sweep(root=root, command=["-m", "seed=0,1,2"], keys=["seed"], jobs=jobs)


def completed(accuracy: float) -> Result:
    headline = {"metric": "eval/accuracy", "goal": "max"}
    return Result(status=Status.COMPLETED, step=10, metrics={"last": {"eval/accuracy": accuracy}}, headline=headline, seconds=2.0)


def test_a_sweep_is_read_back_with_the_status_of_each_job(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    for job, status in zip(sweep.jobs, (Status.RUNNING, Status.PREEMPTED, Status.QUEUED), strict=True):
        job.status = status
    sweep.save()
    assert [job["status"] for job in json.loads((tmp_path / "sweep.json").read_text())["jobs"]] == ["running", "preempted", "queued"]
    assert Sweep.load(tmp_path) == sweep
    assert (tmp_path / "sweep.csv").read_text().splitlines() == [
        "job,seed,status,metric,seconds",
        "0,0,running,,",
        "1,1,preempted,,",
        "2,2,queued,,",
    ]


def test_jobs_that_count_tokens_are_shown_with_their_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = a_sweep(tmp_path)
    last = {"train/tokens_per_s": 51200.4, "train/mfu": 0.41}
    Result(status=Status.COMPLETED, metrics={"last": last, "best": {}}).write(sweep.run_folder(sweep.jobs[1]).result)
    for job in sweep.jobs:
        sweep.read_result(job, None)
    sweep.save()
    assert (tmp_path / "sweep.csv").read_text().splitlines()[:2] == ["job,seed,status,metric,seconds,tokens_per_s,mfu", "0,0,queued,,,,"]
    show(Sweep.load(tmp_path))
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "51,200  41.0%" in shown


def test_jobs_that_nobody_waits_for_keep_the_table_themselves(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    for job in sweep.jobs:
        job.attempts = 1
    sweep.save()
    runs = [sweep.run_folder(job) for job in sweep.jobs]

    def statuses() -> list[str]:
        return [line.split(",")[2] for line in sorted((tmp_path / "sweep.csv").read_text().splitlines()[1:])]

    update_table(runs[1].root, Status.RUNNING)
    assert statuses() == ["queued", "running", "queued"]
    for run in runs[:2]:
        completed(0.5).write(run.result)
    with ThreadPoolExecutor(2) as pool:  # both end at once
        list(pool.map(lambda run: update_table(run.root), runs[:2]))
    assert statuses() == ["completed", "completed", "queued"]
    assert (tmp_path / "sweep.csv").read_text().splitlines()[0] == "job,seed,status,eval/accuracy,seconds"
    lock(tmp_path, key="")
    update_table(runs[2].root, Status.RUNNING)  # who waits for the jobs keeps the table
    unlock_all()
    assert statuses() == ["completed", "completed", "queued"]
    update_table(tmp_path.parent / "of_no_sweep", Status.RUNNING)


def test_a_status_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    a_sweep(tmp_path).save()
    file = tmp_path / "sweep.json"
    file.write_text(file.read_text().replace('"queued"', '"lost"'))
    with pytest.raises(ConfigError, match="'lost' is not a valid Status"):
        Sweep.load(tmp_path)


def test_a_job_without_a_result_was_interrupted_when_it_had_begun(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    sweep.jobs[1].attempts, sweep.jobs[1].status = 1, Status.RUNNING
    for job in sweep.jobs[:2]:
        sweep.read_result(job, None)
    assert [job.status for job in sweep.jobs] == [Status.QUEUED, Status.INTERRUPTED, Status.QUEUED]


def test_the_metric_that_the_objective_names_first_ranks_the_jobs(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    for job, accuracy in zip(sweep.jobs, (0.5, float("nan"), 0.9), strict=True):
        completed(accuracy).write(sweep.run_folder(job).result)
        sweep.read_result(job, None)
    assert (sweep.metric, sweep.goal) == ("eval/accuracy", "max")
    assert [(job.number, job.metric) for job in sweep.ranked()] == [(2, 0.9), (0, 0.5), (1, None)]
    Result(status=Status.FAILED, seconds=1.0, error="ValueError: too large").write(sweep.run_folder(sweep.jobs[2]).result)
    sweep.read_result(sweep.jobs[2], None)
    assert (sweep.jobs[2].status, sweep.jobs[2].metric, sweep.jobs[2].seconds) == (Status.FAILED, None, 1.0)


def test_a_folder_above_a_sweep_is_none_and_the_newest_below_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a sweep\n  expected: a folder with sweep.json\n  fix: ddp-train -m"):
        Sweep.load(tmp_path)
    for day in ("2026-01-01", "2026-01-02"):
        Sweep(root=tmp_path / "sweeps" / day, command=[]).save()
    with pytest.raises(ConfigError, match=r"fix: ddp-train runs \S+2026-01-02"):
        Sweep.load(tmp_path)


def test_of_jobs_that_differ_in_their_seeds_no_best_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = a_sweep(tmp_path)
    for job, accuracy in zip(sweep.jobs, (0.7, 0.8, 0.9), strict=True):
        completed(accuracy).write(sweep.run_folder(job).result)
        sweep.read_result(job, None)
    show(sweep)
    shown = capsys.readouterr().out
    assert f"means    ddp-train runs --group {sweep.root}" in shown and "best" not in shown
