"""Gradients that travel as thin matrices: what comes of them in real runs, and that a run that is stopped goes on with what it left out."""

from __future__ import annotations

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.distributed

RUN = [*TINY, "cluster=cpu", "trainer.max_steps=40", "trainer.max_epochs=null", "trainer.log_every_steps=1", "trainer.clip_grad_norm=1.0"]
RUN += ["evaluation.every_steps=20", "health.check_replicas_every_steps=1", "loader.micro_batch_size=8", "trainer.grad_accum_steps=2"]
RUN += ["callbacks=[freeze]", "callbacks.freeze.patterns=['*.bias']", "callbacks.freeze.until_step=12"]
THIN = ["strategy=power_sgd", "strategy.rank=2", "strategy.from_step=5"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 2, 4])
def test_it_learns_as_ddp_does_and_goes_on_to_the_bit(project: Project, ranks: int) -> None:
    """With accumulation, clipping, and parameters that are trained from a later step on."""
    losses = {}
    ways = {"ddp": [], "thin": THIN, "twice": [*THIN, "debug.faults=[{kind:sigterm,rank:1,step:22}]"]}
    ways["killed"] = [*THIN, "checkpoint.every_steps=8", "cluster.max_restarts=1", "debug.faults=[{kind:kill,rank:1,step:21}]"]
    for name, own in ways.items():
        done = project.run(*RUN, f"cluster.processes_per_node={ranks}", *own, f"hydra.run.dir=outputs/{name}")
        if name == "twice":
            assert done.returncode == 75, done.output
            done = project.run("resume", "outputs/twice", "debug.faults=[]")
        assert done.returncode == 0, done.output
        losses[name] = [record["loss"] for record in metrics(project.folder / "outputs" / name, "train")]
    assert losses["thin"][:5] == pytest.approx(losses["ddp"][:5], rel=1e-5)
    assert losses["thin"][6:] != pytest.approx(losses["ddp"][6:], rel=1e-5)
    assert sum(losses["thin"][-10:]) == pytest.approx(sum(losses["ddp"][-10:]), rel=0.05)
    assert losses["twice"] == losses["killed"] == losses["thin"]


def test_another_number_of_ranks_goes_on_without_what_was_left_out(project: Project) -> None:
    run = [*RUN, *THIN, "hydra.run.dir=outputs/run"]
    assert project.run(*run, "cluster.processes_per_node=3", "trainer.max_steps=10").returncode == 0
    done = project.run("resume", "outputs/run", "cluster.processes_per_node=2", "trainer.max_steps=14")
    assert done.returncode == 0, done.output
    assert [record["step"] for record in metrics(project.folder / "outputs/run", "train")] == list(range(1, 15))
