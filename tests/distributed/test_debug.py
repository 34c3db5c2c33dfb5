"""`debug=overfit` as it is typed: one batch is learned by heart, on one process and on two."""

from __future__ import annotations

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_learns_its_first_batch_by_heart(project: Project, processes: int) -> None:
    words = [*TINY, "trainer.max_epochs=100", "optimizer.lr=0.01", "cluster=cpu", f"cluster.processes_per_node={processes}"]
    done = project.run(*words, "debug=overfit", timeout=600)
    assert done.returncode == 0, done.output
    assert "debug.overfit: the first global batch is trained on, again and again" in done.stdout
    run = project.the_run()
    losses = [record["loss"] for record in metrics(run, "train")]
    assert losses[0] > 2 and losses[-1] < 0.01
    assert metrics(run, "eval")[-1]["loss"] > 1  # it has learned one batch, and nothing else
