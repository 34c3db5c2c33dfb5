"""A sweep that is stopped by a signal, at any time, has lost nothing and blames nobody."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conftest import FEW, Project, finish, wait_for
from tests.distributed.test_sweep import statuses

pytestmark = pytest.mark.distributed

LONG = ["-m", "model=mlp", "model.width=16", *FEW, "trainer.max_steps=100000", "trainer.max_epochs=null", "cluster=cpu"]


@pytest.mark.parametrize(("number", "code", "delay_s"), [(signal.SIGINT, 130, 0.05), (signal.SIGTERM, 75, 1.0)])
def test_a_stop_while_the_processes_start_is_no_failure(project: Project, number: signal.Signals, code: int, delay_s: float) -> None:
    process = project.start(*LONG, "seed=1,2", "hydra.sweep.dir=sweep")
    sweep = project.folder / "sweep"
    wait_for(lambda: (sweep / "sweep.json").exists() and statuses(sweep)[:1] == ["running"])
    time.sleep(delay_s)
    process.send_signal(number)
    done = finish(process, timeout=20)
    assert done.returncode == code, done.output
    assert statuses(sweep)[0] in ("interrupted", "preempted")
    assert statuses(sweep)[1] == "queued"
    assert "failed" not in done.output
    assert not (sweep / "0/failure.json").exists()
