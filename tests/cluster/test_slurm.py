"""`cluster=slurm` on the real SLURM: a run from its submission to its end, and how people stop it and go on."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from ddp_train.run_folder.paths import RunFolder
from tests.cluster.machine import children
from tests.cluster.slurm_project import SLOW, SlurmProject, logs, losses, project, steps_of

pytestmark = pytest.mark.cluster
__all__ = ["project"]


def test_two_nodes_of_two_processes_give_the_losses_of_one_machine(project: SlurmProject) -> None:
    job, run_folder = project.submit(steps=20)
    end = project.ended(job, "COMPLETED")
    assert end["Restarts"] == "0" and run_folder.is_completed()
    assert [path.parent.name for path in project.folder.glob("outputs/*/config.yaml")] == ["run"]
    assert losses(run_folder) == pytest.approx(project.losses_alone(steps=20), rel=1e-5)
    assert {path.name for path in run_folder.logs.glob("*.out")} == {f"slurm-{job}.out", f"slurm-{job}-node1.out", f"slurm-{job}-node2.out"}
    assert project.type("status", "outputs/run").stdout.startswith("outputs/run: done\n")
    assert project.type("verdict", "outputs/run").stdout == "done\n"


@pytest.mark.cluster_long
def test_a_signal_requeues_and_cancel_does_not_and_resume_goes_on(project: SlurmProject) -> None:
    """One run, bitwise that of one without a stop: requeued after USR1, cancelled, resumed, ended by scancel, and resumed to its end."""
    job, run_folder = project.submit(SLOW, steps=400)
    assert "running on node1, node2" in project.type("status", "outputs/run").stdout or project.ended(job, "RUNNING")
    project.trains(run_folder)
    project.bed.must("scancel", "--signal=USR1", job)
    project.restarts(job, 1)
    assert "again: stopped in good order" in (run_folder.logs / f"slurm-{job}.out").read_text(), logs(run_folder.root)
    reached = max(steps_of(run_folder))
    project.trains(run_folder, beyond=reached)

    refused = project.type("resume", "outputs/run")
    assert refused.returncode == 2 and f"is running as job {job}" in refused.output
    cancelled = project.type("cancel", "outputs/run")
    assert cancelled.returncode == 0 and "cancelled; `ddp-train resume outputs/run` continues it from step" in cancelled.stdout, (
        cancelled.output
    )
    end = project.ended(job, "FAILED")
    assert (end["ExitCode"], end["Restarts"]) == ("130:0", "1"), logs(run_folder.root)
    assert project.type("verdict", "outputs/run").returncode == 130

    reached = max(steps_of(run_folder))
    job = project.submitted(project.type("resume", "outputs/run"))
    project.trains(run_folder, beyond=reached)
    project.bed.must("scancel", job)
    assert project.ended(job, "CANCELLED")["Restarts"] == "0"
    project.wait(lambda: run_folder.read_result() is not None, "saved", within_s=20)

    job = project.submitted(project.type("resume", "outputs/run", "debug.faults=[]"))
    project.ended(job, "COMPLETED")
    assert losses(run_folder) == project.losses_alone(steps=400)


@pytest.mark.cluster_long
def test_in_an_allocation_it_runs_at_once_and_ctrl_c_saves(project: SlurmProject) -> None:
    words = [sys.executable, "-m", "ddp_train", *project.words(SLOW, steps=600)]
    salloc = project.start("salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", *words)
    run_folder = RunFolder(project.folder / "outputs/run")
    project.trains(run_folder, beyond=2)
    [typed] = children(salloc.pid)
    sent = time.monotonic()
    os.kill(typed, signal.SIGINT)
    ended = salloc.finish(timeout=60)
    assert ended.returncode == 130 and time.monotonic() - sent < 40, ended.output
    assert "never: stopped by Ctrl-C" in ended.stderr and run_folder.saved_steps()[-1:] == [max(steps_of(run_folder))]
    assert not run_folder.submitted.exists()


def test_a_task_of_srun_is_refused(project: SlurmProject) -> None:
    for per_node, why in ((1, "this command is already a task of srun"), (2, "srun starts 2 tasks on a node")):
        srun = ["srun", f"--nodes={3 - per_node}", f"--ntasks-per-node={per_node}"]
        ended = project.bed.run(*srun, sys.executable, "-m", "ddp_train", *project.words(), cwd=project.folder)
        assert ended.returncode == 2 and why in ended.output, ended.output
