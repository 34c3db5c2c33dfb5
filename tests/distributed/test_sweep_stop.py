"""A sweep that is stopped by a signal, at any time, has lost nothing and blames nobody."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conftest import FEW, Project, finish, metrics, our_processes, wait_for
from tests.distributed.test_sweep import statuses

pytestmark = pytest.mark.distributed

LONG = ["-m", "model=mlp", "model.width=16", *FEW, "trainer.max_steps=100000", "trainer.max_epochs=null", "cluster=cpu"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("delay_s", [0.05, 1.0])
def test_a_stop_while_the_processes_start_is_no_failure(project: Project, number: signal.Signals, code: int, delay_s: float) -> None:
    process = project.start(*LONG, "seed=1,2", "hydra.sweep.dir=sweep")
    sweep = project.folder / "sweep"
    wait_for(lambda: (sweep / "sweep.json").exists() and statuses(sweep)[0] == "running")
    time.sleep(delay_s)
    process.send_signal(number)
    done = finish(process, timeout=20)
    assert done.returncode == code, done.output
    assert statuses(sweep)[0] in ("interrupted", "preempted")
    assert statuses(sweep)[1] == "queued"
    assert "failed" not in done.output
    assert not (sweep / "0/failure.json").exists()


def test_ctrl_c_saves_what_runs_and_the_sweep_goes_on_from_there(project: Project) -> None:
    process = project.start(*LONG, "seed=1,2,3", "sweep.parallel_jobs=2", "hydra.sweep.dir=sweep")
    sweep = project.folder / "sweep"
    wait_for(lambda: all((sweep / name / "metrics.jsonl").exists() and len(metrics(sweep / name)) > 3 for name in "01"))
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout=30)
    assert done.returncode == 130, done.output
    assert statuses(sweep) == ["interrupted", "interrupted", "queued"]
    assert all(list((sweep / name).glob("checkpoints/step_*/COMPLETE")) for name in "01")
    wait_for(lambda: not our_processes(project.folder), timeout_s=3)
