"""A run of two ranks is asked to record while it trains."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

import pytest

from tests.conftest import TINY, Project, finish, metrics, wait_for

pytestmark = pytest.mark.distributed


def recorded(run: Path, rank: int) -> list[str]:
    """Return the names of a rank's only trace."""
    (found,) = (run / "profile").glob(f"rank_{rank:05d}_*.pt.trace.json.gz")
    with gzip.open(found, "rt") as stream:
        return [event["name"] for event in json.load(stream)["traceEvents"]]


def test_a_run_that_goes_on_records_the_same_steps_on_the_ranks_that_are_asked(project: Project) -> None:
    endless = ["trainer.max_steps=1000000", "trainer.max_epochs=null", "trainer.log_every_steps=5"]
    process = project.start(*TINY, *endless, "cluster=cpu", "profile.steps=2", "profile.ranks=[0,1]")
    wait_for(lambda: any((run / "metrics.jsonl").exists() and len(metrics(run)) > 2 for run in project.runs()))
    run = project.the_run()
    (run / "profile.request").touch()
    wait_for(lambda: len(list((run / "profile").glob("rank_*.txt"))) == 2)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.output
    steps = [sorted({name for name in recorded(run, rank) if name.startswith("ProfilerStep#")}) for rank in (0, 1)]
    assert steps[0] == steps[1] and len(steps[0]) == 2
    for rank in (0, 1):
        assert {"data", "forward", "backward", "optimizer", "gloo:all_reduce"} <= set(recorded(run, rank))
    assert "communication: " in done.stdout and "ms a step" in done.stdout
