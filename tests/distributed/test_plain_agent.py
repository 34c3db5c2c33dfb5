"""`cluster.agent=torch`: torchrun's own agent, with nothing of ours in it."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import TINY, Project, finish, wait_for

pytestmark = pytest.mark.distributed

PLAIN = (*TINY, "cluster=cpu", "cluster.agent=torch", "trainer.max_epochs=null")


def test_a_killed_rank_is_started_again_and_a_stopped_run_is_saved(project: Project) -> None:
    fault = ["debug=faults", "debug.faults=[{kind: kill, rank: 1, step: 8}]", "cluster.max_restarts=1", "checkpoint.every_steps=2"]
    run = project.start(*PLAIN, *fault, "trainer.max_steps=20000", "hydra.run.dir=outputs/a")
    records = project.folder / "outputs/a/metrics.jsonl"
    wait_for(lambda: records.exists() and '"step": 12,' in records.read_text())
    run.send_signal(signal.SIGTERM)
    done = finish(run)
    assert done.returncode == 75, done.stderr
    assert "agent    torchrun's own: ranks have 30 s after a stop signal" in done.stdout
    assert "resumed  after step " in done.stdout and "saved; `" in done.stdout


def test_several_machines_need_our_agent(project: Project) -> None:
    run = project.run(*TINY, "cluster=machines", "cluster.agent=torch")
    assert run.returncode == 2 and "cluster.agent: is torch, and cluster.launcher=machines starts agents of ours" in run.stderr
