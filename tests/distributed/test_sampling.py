"""Samples that are drawn by weight: the same run on any number of processes, through a stop."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_a_weighted_run_that_goes_on_with_other_processes_is_the_run_of_one(project: Project) -> None:
    np.save(project.folder / "weights.npy", np.arange(101) % 10)
    command = [*TINY, "data.num_samples=101", "loader.sampling=weighted", "loader.sample_weights=weights.npy", "loader.micro_batch_size=8"]
    command += ["trainer.global_batch_size=32", "trainer.max_epochs=null", "scheduler=constant", "cluster=cpu"]
    whole = project.run(*command, "trainer.max_steps=11", "cluster.processes_per_node=1", "hydra.run.dir=outputs/whole")
    assert whole.returncode == 0, whole.output
    runs = project.folder / "outputs"
    first = project.run(*command, "trainer.max_steps=6", "cluster.processes_per_node=2", "hydra.run.dir=outputs/changed")
    assert first.returncode == 0, first.output
    second = project.run("resume", "outputs/changed", "trainer.max_steps=11", "cluster.processes_per_node=3", "loader.num_workers=1")
    assert second.returncode == 0, second.output
    for mine, theirs in zip(metrics(runs / "whole", "train"), metrics(runs / "changed", "train"), strict=True):
        assert (mine["step"], mine["samples"]) == (theirs["step"], theirs["samples"])
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
