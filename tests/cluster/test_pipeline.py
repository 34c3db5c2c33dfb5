"""Runs of which one comes after the other, as jobs of the real SLURM."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.machine import until
from tests.cluster.slurm import Slurm
from tests.conftest import TINY, Project, metrics

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_long]

RUN = [*TINY, "cluster=slurm", "cluster.device=cpu", "cluster.processes_per_node=1", "cluster.slurm.cpus_per_node=1", "cluster.grace_s=5"]
SLOW = ["trainer.max_steps=60", "trainer.max_epochs=null", "debug.faults=[{kind:slow,seconds:0.25,attempt:every}]"]


def submit(bed: Slurm, folder: Path, *words: str) -> str:
    """Submit a run, and return the job's id."""
    done = bed.run(sys.executable, "-m", "ddp_train", *RUN, *words, cwd=folder)
    found = re.search(r"submitted as job (\d+)", done.stdout)
    assert done.returncode == 0 and found, done.output
    return found[1]


def test_the_second_job_waits_over_a_requeue_of_the_first_and_begins_with_its_weights(
    slurm: Callable[..., Slurm], project: Project
) -> None:
    bed, first = slurm(2), project.folder / "first"
    one = submit(bed, project.folder, *SLOW, "hydra.run.dir=first")
    two = submit(bed, project.folder, "after=first", "init_from=first", "hydra.run.dir=second", "trainer.max_steps=3")
    until(lambda: (first / "metrics.jsonl").exists(), "the first run takes a step", within_s=120)
    bed.must("scancel", "--signal=USR1", one)
    said = bed.wait_for(one, "PENDING", within_s=60)
    assert said["Restarts"] == "1"
    assert (bed.job(two)["JobState"], bed.job(two)["Reason"]) == ("PENDING", "Dependency")
    bed.wait_for(one, "COMPLETED", within_s=180)
    bed.wait_for(two, "COMPLETED", within_s=120)
    records = metrics(project.folder / "second")
    assert records[0]["time"] > metrics(first)[-1]["time"]
    logs = "".join(path.read_text() for path in (project.folder / "second/logs").glob("slurm-*"))
    assert "tensors from " in logs and "step_00000060" in logs


def test_a_job_whose_first_run_is_cancelled_is_taken_out_of_the_queue(slurm: Callable[..., Slurm], project: Project) -> None:
    bed = slurm(1)
    one = submit(bed, project.folder, *SLOW, "hydra.run.dir=first")
    two = submit(bed, project.folder, "after=first", "hydra.run.dir=second")
    until(lambda: (project.folder / "first/metrics.jsonl").exists(), "the first run takes a step", within_s=120)
    done = bed.run(sys.executable, "-m", "ddp_train", "cancel", "first", cwd=project.folder)
    assert done.returncode == 0, done.output
    bed.wait_for(one, "CANCELLED", "FAILED", within_s=60)
    assert bed.wait_for(two, "CANCELLED", within_s=60)["Reason"] in ("DependencyNeverSatisfied", "Dependency", "None")
    refused = bed.run(sys.executable, "-m", "ddp_train", *RUN, "after=first", cwd=project.folder)
    assert refused.returncode == 78 and "after: first will not finish: cancelled" in refused.stderr
