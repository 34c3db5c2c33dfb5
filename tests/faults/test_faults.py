"""What `debug.faults` lists happens to a real run, and the run gets on."""

from __future__ import annotations

import re

import pytest

from tests.conftest import TINY, Project, metrics
from tests.distributed.test_restart import numbers

pytestmark = pytest.mark.distributed


RUN = [*TINY, "trainer.max_steps=10", "trainer.max_epochs=null", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"]
RUN += ["cluster=cpu", "cluster.processes_per_node=3", "optimizer=adamw"]
SAID = {"bit_flip": r"\S+ is damaged", "truncate": r"\S+ has \S+ bytes instead of \S+", "missing_file": r"\S+ is missing"}


@pytest.mark.long
def test_a_run_survives_the_faults_that_are_asked_for(project: Project) -> None:
    """The only checkpoint is damaged, and a rank killed."""
    faults = "{kind:bit_flip,step:3},{kind:kill,rank:1,step:3}"
    done = project.run(*RUN, "cluster.max_restarts=1", "debug=faults", f"debug.faults=[{faults}]")
    assert done.returncode == 0, done.output
    assert "debug    faults to inject: bit_flip, kill" in done.output
    assert "rank 1 failed (SIGKILL); restart 1 of 1" in done.output
    assert re.search(r"step_00000002 is not used: \S+ is damaged", done.output), done.output
    log = (project.the_run() / "logs/rank_00001.log").read_text()
    assert log.count("debug.faults: kill, at step after step 3") == 1
    assert [record["step"] for record in metrics(project.the_run(), "train")] == list(range(1, 11))


@pytest.mark.long
def test_a_damaged_checkpoint_of_shards_is_found_and_the_one_before_is_used(project: Project) -> None:
    """Again and again in one run, and in the end every number is that of a run that nothing happened to."""
    whole = project.run(*RUN, "strategy=fsdp", "hydra.run.dir=outputs/whole")
    assert whole.returncode == 0, whole.output
    each = [f"{{kind:{kind},step:5,attempt:{attempt}}}" for attempt, kind in enumerate(SAID)]
    faults = [*each, *(f"{{kind:kill,rank:1,step:5,attempt:{attempt}}}" for attempt in range(3))]
    run = [*RUN, "strategy=fsdp", "hydra.run.dir=outputs/damaged", "checkpoint.keep_last=3"]
    done = project.run(*run, "debug=faults", f"debug.faults=[{','.join(faults)}]", "cluster.max_restarts=9")
    assert done.returncode == 0, done.output
    for number, said in enumerate(SAID.values(), 1):
        assert f"restart {number} of 9" in done.output, done.output
        assert re.search(f"step_00000004 is not used: {said}", done.output), done.output
    assert done.output.count("resumed  after step 2") == 3, done.output
    assert numbers(project.folder / "outputs/damaged") == numbers(project.folder / "outputs/whole")
