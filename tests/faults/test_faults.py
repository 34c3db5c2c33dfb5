"""What `debug.faults` lists happens to a real run, and the run gets on."""

from __future__ import annotations

import re

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.distributed


def test_a_run_survives_one_fault_after_another(project: Project) -> None:
    """A checkpoint that is damaged and a killed rank; then a killed loader worker; then a data set that raises."""
    faults = (
        "{kind:bit_flip,step:5},{kind:kill,rank:1,step:5},{kind:worker_kill,rank:2,step:7,attempt:1},{kind:worker_raise,rank:1,attempt:2}"
    )
    done = project.run(
        *TINY,
        *["trainer.max_steps=12", "trainer.max_epochs=null", "checkpoint.every_steps=2", "data.num_workers=1", "cluster=cpu"],
        *["cluster.processes_per_node=3", "cluster.max_restarts=3", "debug=faults", f"debug.faults=[{faults}]"],
    )
    assert done.returncode == 0, done.output
    assert "debug    4 faults to inject: bit_flip, kill, worker_kill, worker_raise" in done.output
    assert "rank 1 failed (SIGKILL); restart 1 of 3 from step 4" in done.output
    assert re.search(r"step_00000004 is not used: \S+ is damaged", done.output), done.output
    assert re.search(r"rank 2 failed \(DataError: .*ended by SIGKILL.*\); restart 2 of 3 from step \d", done.output), done.output
    assert re.search(r"rank 1 failed \(InjectedFault: .*\); restart 3 of 3 from step \d", done.output), done.output
    log = (project.the_run() / "logs/rank_00001.log").read_text()
    assert log.count("debug.faults: kill, at step after step 5") == 1
    assert [record["step"] for record in metrics(project.the_run(), "train")] == list(range(1, 13))
