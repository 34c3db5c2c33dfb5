"""What `debug.faults` lists happens to a real run, and the run gets on."""

from __future__ import annotations

import re

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.distributed


def test_a_run_survives_one_fault_after_another(project: Project) -> None:
    """The only checkpoint is damaged, and a loader worker killed."""
    faults = "{kind:bit_flip,step:3},{kind:worker_kill,rank:2,step:3}"
    done = project.run(
        *TINY,
        *["trainer.max_steps=10", "trainer.max_epochs=null", "checkpoint.every_steps=2", "data.num_workers=1", "cluster=cpu"],
        *["cluster.processes_per_node=3", "cluster.max_restarts=1", "debug=faults", f"debug.faults=[{faults}]"],
        timeout=240,
    )
    assert done.returncode == 0, done.output
    assert "debug    2 faults to inject: bit_flip, worker_kill" in done.output
    assert re.search(r"step_00000002 is not used: \S+ is damaged", done.output), done.output
    assert re.search(r"rank 2 failed \(RunError: .*ended by SIGKILL.*\); restart 1 of 1 from step \d", done.output), done.output
    log = (project.the_run() / "logs/rank_00002.log").read_text()
    assert log.count("debug.faults: worker_kill, at step after step 3") == 1
    assert [record["step"] for record in metrics(project.the_run(), "train")] == list(range(1, 11))
