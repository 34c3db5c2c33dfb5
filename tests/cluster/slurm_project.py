"""A project on the login node of a SLURM cluster, and what its runs leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.deadline import wait_until
from tests.cluster.machine import Running
from tests.cluster.slurm import Slurm
from tests.conftest import FEW, Finished

SMALL = ["model=mlp", "model.width=16", *FEW, "cluster.grace_s=5", "trainer.max_epochs=null", "checkpoint.every_steps=10"]
SLOW = "+debug.faults=[{kind:slow,seconds:0.2,attempt:every}]"
"""Steps take a fifth of a second."""


@dataclass
class SlurmProject:
    """Where a user types `ddp-train cluster=slurm`."""

    bed: Slurm
    folder: Path

    def type(self, *words: str, **options: Any) -> Finished:
        """Type `ddp-train WORDS` on the login node."""
        return self.bed.run(sys.executable, "-m", "ddp_train", *words, cwd=self.folder, **options)

    def start(self, *command: str) -> Running:
        """Start a command there, and do not wait."""
        return self.bed.start(*command, cwd=self.folder)

    def words(self, *words: str, name: str = "run", nodes: int = 2, steps: int = 60) -> list[str]:
        """Return what is typed for a run of two processes on each node."""
        shape = ["cluster=slurm", "cluster.device=cpu", f"cluster.nodes={nodes}", "cluster.processes_per_node=2"]
        return [*shape, *SMALL, f"hydra.run.dir=outputs/{name}", f"trainer.max_steps={steps}", *words]

    def submit(self, *words: str, **shape: Any) -> tuple[str, RunFolder]:
        """Submit a run; return its job and its folder."""
        done = self.type(*self.words(*words, **shape))
        return self.submitted(done), RunFolder(self.folder / "outputs" / shape.get("name", "run"))

    def submitted(self, done: Finished) -> str:
        """Return the job that a command has submitted."""
        found = re.search(r"^submitted as job (\d+): ", done.stdout, re.MULTILINE)
        assert done.returncode == 0 and found is not None, done.output
        return found[1]

    def ended(self, job: str, *states: str, within_s: float = 180) -> dict[str, str]:
        """Wait until a job is in one of these states, and return what SLURM says of it."""
        try:
            return self.bed.wait_for(job, *states, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{logs(self.folder)}") from None

    def trains(self, run_folder: RunFolder, *, beyond: int = 0) -> None:
        """Wait until a run has taken more steps than that."""
        self.wait(lambda: max(steps_of(run_folder), default=0) > beyond, f"more than {beyond} steps", within_s=150)

    def restarts(self, job: str, times: int) -> None:
        """Wait until SLURM has started a job again so many times."""
        self.wait(lambda: int(self.bed.job(job)["Restarts"]) >= times, f"{times} restarts of job {job}", within_s=150)

    def wait(self, is_so: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Wait for something that takes SLURM or a run seconds; the message of a failure has the logs."""
        if not wait_until(is_so, within_s=within_s, every_s=0.5):
            raise AssertionError(f"not in {within_s} s: {what}\n{logs(self.folder)}")

    def has_a_step(self, job: str) -> bool:
        """Tell whether srun has started the tasks of a job."""
        return f"{job}.0" in self.bed.run("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i").stdout.split()

    def losses_alone(self, *words: str, steps: int) -> dict[int, float]:
        """Return the losses of the same run on one machine, without a stop."""
        command = [
            "cluster=cpu",
            "cluster.processes_per_node=4",
            *SMALL,
            f"trainer.max_steps={steps}",
            "hydra.run.dir=outputs/alone",
            *words,
        ]
        subprocess.run([sys.executable, "-m", "ddp_train", *command], cwd=self.folder, check=True, capture_output=True)
        return losses(RunFolder(self.folder / "outputs/alone"))


@pytest.fixture
def project(slurm_hosts: Callable[..., Slurm], tmp_path: Path) -> SlurmProject:
    """Give a project on a cluster of three nodes, each on a host of its own. Tests import it."""
    return make(slurm_hosts(3), tmp_path)


def make(bed: Slurm, folder: Path) -> SlurmProject:
    """Make an empty project on a cluster."""
    (folder / "project").mkdir()
    return SlurmProject(bed, folder / "project")


def records(run_folder: RunFolder) -> list[dict[str, Any]]:
    try:
        lines = run_folder.metrics.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def steps_of(run_folder: RunFolder) -> list[int]:
    return [record["step"] for record in records(run_folder) if record["split"] == "train"]


def losses(run_folder: RunFolder) -> dict[int, float]:
    """Return the loss of each step; no step is there twice."""
    steps = steps_of(run_folder)
    assert steps == sorted(set(steps)), steps
    return {record["step"]: record["loss"] for record in records(run_folder) if record["split"] == "train"}


def logs(folder: Path) -> str:
    """Return the ends of the logs of all jobs, for the message of a test that fails."""
    return "".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(folder.rglob("*.out")))
