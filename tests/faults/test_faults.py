"""What `debug.faults` lists happens to a real run, and the run gets on."""

from __future__ import annotations

import re

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_a_run_survives_the_faults_that_are_asked_for(project: Project) -> None:
    """The only checkpoint is damaged, and a rank killed."""
    faults = "{kind:bit_flip,step:3},{kind:kill,rank:1,step:3}"
    done = project.run(
        *TINY,
        *["trainer.max_steps=10", "trainer.max_epochs=null", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"],
        *["cluster=cpu", "cluster.processes_per_node=3", "cluster.max_restarts=1", "debug=faults", f"debug.faults=[{faults}]"],
    )
    assert done.returncode == 0, done.output
    assert "debug    2 faults to inject: bit_flip, kill" in done.output
    assert "rank 1 failed (SIGKILL); restart 1 of 1" in done.output
    assert re.search(r"step_00000002 is not used: \S+ is damaged", done.output), done.output
    log = (project.the_run() / "logs/rank_00001.log").read_text()
    assert log.count("debug.faults: kill, at step after step 3") == 1
    assert [record["step"] for record in metrics(project.the_run(), "train")] == list(range(1, 11))
