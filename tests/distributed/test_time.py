"""Where the time of real runs went: each rank's parts, slow ranks with their cause, and goodput over attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.times import AttemptTimes, goodput_of, read_times
from ddp_train.system.phase import Part
from tests.conftest import TINY, Project

pytestmark = pytest.mark.distributed

RUN = [*TINY, "cluster=cpu", "cluster.processes_per_node=2", "trainer.max_epochs=null", "trainer.log_every_steps=5", "sanity_check=false"]
SLOW_S = 0.4
"""Longer than any step on a busy machine: four or five steps are a look."""

DATA, COMMUNICATION = map([*Part].index, (Part.DATA, Part.COMMUNICATION))  # columns


def slow(phase: str) -> list[str]:
    fault = f"{{kind:slow,rank:1,step:0,phase:{phase},seconds:{SLOW_S}}}"
    return ["debug=faults", f"debug.faults=[{fault}]", "trainer.max_steps=25"]


def the_attempt(run: Path) -> AttemptTimes:
    """Return the only attempt of a run; its ranks' parts sum to the wall time."""
    [attempt] = read_times(RunFolder(run))
    wall = sum(span.seconds for span in attempt.spans)
    for rank in range(2):
        assert sum(sum(filter(None, span.ranks[rank])) for span in attempt.spans) == pytest.approx(wall, rel=0.03)
    return attempt


def events(run: Path) -> list[dict[str, Any]]:
    file = run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    ("words", "phase", "cause"),
    [
        ([], "data", "data"),
        ([], "step", "compute"),
        (["strategy=zero1"], "step", "compute"),
        (["strategy=power_sgd"], "step", "compute"),
        (["strategy=local_sgd"], "step", "compute"),
        (["strategy=fsdp"], "data", "data"),
        (["trainer.global_batch_size=64", "loader.micro_batch_size=16"], "step", "compute"),  # accumulates
    ],
)
def test_a_slow_rank_is_named_with_its_machine_and_cause(project: Project, words: list[str], phase: str, cause: str) -> None:
    done = project.run(*RUN, *words, *slow(phase), timeout=240)
    assert done.returncode == 0, done.stderr
    run = project.the_run()
    [event] = events(run)
    attempt = the_attempt(run)
    assert (event["kind"], event["rank"], event["host"], event["cause"]) == ("slow_rank", 1, attempt.hosts[1], cause)
    assert event["ratio"] > 1.3
    assert done.stdout.count("slow     rank 1 on ") == 1 and f"  slow                 step {event['step']}: {event['text']}" in done.stdout
    data, waits = ([sum(span.ranks[rank][part] or 0 for span in attempt.spans) for rank in range(2)] for part in (DATA, COMMUNICATION))
    assert (data[1] - data[0] > 0.5 * 25 * SLOW_S) == (cause == "data")
    if words == ["strategy=fsdp"]:
        assert "FSDP" in attempt.not_split["communication"] and attempt.spans[0].ranks[0][COMMUNICATION] is None
    else:  # the other one waits, and it does not
        assert waits[0] - waits[1] > 0.5 * 25 * SLOW_S and attempt.not_split == {}


def test_no_rank_of_an_undisturbed_run_is_named_and_one_rank_alone_has_no_communication(project: Project) -> None:
    done = project.run(*RUN, "trainer.max_steps=400", "cluster.processes_per_node=1")
    assert done.returncode == 0, done.stderr
    [attempt] = read_times(RunFolder(project.the_run()))
    assert events(project.the_run()) == [] and attempt.not_split == {}
    assert sum(span.ranks[0][COMMUNICATION] or 0 for span in attempt.spans) < 0.1 * sum(span.seconds for span in attempt.spans)


def test_goodput_over_a_restart_and_a_resume_accounts_for_all_of_the_wall_time(project: Project) -> None:
    fault = "debug.faults=[{kind:kill,rank:1,step:18}]"
    words = [
        "trainer.max_steps=30",
        "checkpoint.every_steps=10",
        "evaluation.every_steps=10",
        "cluster.max_restarts=1",
        "debug=faults",
        fault,
    ]
    done = project.run(*RUN, *words)
    assert done.returncode == 0, done.stderr
    run = project.the_run()
    first, second = read_times(RunFolder(run))
    assert (first.restart, second.restart, first.step, second.step) == (False, True, 0, 10)
    goodput = json.loads((run / "result.json").read_text())["goodput"]
    assert goodput["wall_s"] == pytest.approx(second.ended - first.started, abs=0.01)
    assert sum(goodput[f"{name}_s"] for name in ("steps", "lost", "evaluation", "checkpoint", "start", "restart", "queue", "stopped"))
    assert goodput["lost_s"] > 0 < goodput["restart_s"] and goodput["stopped_s"] == 0 and 0 < goodput["share"] < 1
    again = project.run("resume", str(run), "trainer.max_steps=35", "debug.faults=[]")
    assert again.returncode == 0, again.stderr
    attempts = read_times(RunFolder(run))
    resumed = goodput_of(attempts)
    assert len(attempts) == 3 and resumed is not None and resumed["stopped_s"] > 0
    status = json.loads(project.run("status", str(run), "--json").stdout)
    assert status["goodput"]["share"] == resumed["share"] and status["slow_ranks"] == []
    assert "of the time since the first start went into steps" in again.stdout
