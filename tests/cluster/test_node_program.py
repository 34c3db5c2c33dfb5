"""`ddp-train node SPEC` on hosts of their own, as SLURM's tasks start it: a machine that differs or is late is named on every terminal.

Nobody of SLURM is here: an `sbatch` that only says a number gives the true folder of a submitted run, and the test plays srun.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_train.run_folder.failure import load_report
from ddp_train.run_folder.paths import RunFolder
from tests.cluster.hosts import Hosts
from tests.cluster.machine import Running, until
from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.cluster_long

MINE = """
import os, socket
from pathlib import Path
from ddp_train.data.synthetic_images import SyntheticImages
from ddp_train.model.mlp import MLP

class Data(SyntheticImages):
    def __init__(self, root, **others):
        super().__init__(**others)

class Model(MLP):
    def __init__(self, **others):
        super().__init__(**others)
        told = [os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]
        with Path("counts.txt").open("a") as file:
            print(socket.gethostname(), os.environ["RANK"], *told, file=file)
"""
OWN = ["data._target_=mine.Data", "+data.root=data", "model._target_=mine.Model"]
SHAPE = ["cluster=slurm", "cluster.device=cpu", "cluster.nodes=3", "cluster.processes_per_node=1", "hydra.run.dir=outputs/run"]
NAMED_S = 5.0
START_S = 90.0  # from the start of a program to its arrival: torch's import, on a machine that does other things too


@dataclass
class Submitted:
    """A run over three hosts that was submitted, and starts of its machines."""

    hosts: Hosts
    project: Project
    run_folder: RunFolder

    def start(self, host: int, env: dict[str, str] | None = None) -> Running:
        """Start the task of a host, as srun does."""
        step = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_NODEID": str(host),
            "SLURM_STEP_NODELIST": "node[0-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        }
        task = ["bash", str(self.run_folder.launch / "task.sh"), "node", str(self.run_folder.spec)]
        return self.hosts.start(host, *task, cwd=self.project.folder, env={**step, **(env or {})})

    def arrives(self, host: int, running: Sequence[Running]) -> None:
        """Wait until a host has a connection to another one, open or closed, or has been refused: its connection may be gone by then."""
        tables = [Path(f"/proc/{self.hosts[host].pid}/net/{name}") for name in ("tcp", "tcp6")]

        def is_here() -> bool:
            others = [line.split()[2].partition(":")[2] for table in tables for line in table.read_text().splitlines()[1:]]
            return any(port != "0000" for port in others) or "refuses this machine" in running[-1].output

        until(is_here, "\n\n".join(each.output for each in running), within_s=START_S)

    def names(self, said: Sequence[str], running: Sequence[Running]) -> None:
        """Check that all these terminals say so, each line with its host, in 5 s from now."""
        began = time.monotonic()
        texts = "\n\n".join(each.output for each in running)
        until(lambda: all(text in each.output for each in running for text in said), f"{said} in\n{texts}", within_s=NAMED_S)
        print(f"named after {time.monotonic() - began:.1f} s")  # -s shows it


@pytest.fixture
def submit(project: Project, hosts: Callable[[int], Hosts]) -> Callable[..., Submitted]:
    """Submit a run to nobody."""

    def make(*words: str) -> Submitted:
        project.write("mine.py", MINE)
        project.write("data/images.bin", "0" * 5000)
        project.write("other/mine.py", MINE + "# changed\n")
        project.write("other/images.bin", "0" * 2500 + "1" + "0" * 2499)
        project.write("packages/torch-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
        project.write("bin/sbatch", "#!/bin/sh\necho 1\n").chmod(0o700)
        three = hosts(3)
        path = {"PATH": f"{project.folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        typed = [sys.executable, "-m", "ddp_train", *TINY, *SHAPE, *OWN, *words]
        done = three.run(0, *typed, cwd=project.folder, env=path)
        assert done.returncode == 0 and "submitted as job 1: outputs/run" in done.stdout, done.output
        return Submitted(three, project, RunFolder(project.folder / "outputs/run"))

    return make


def codes(running: Sequence[Running]) -> list[int | None]:
    """Wait for the end of all, and return their exit codes."""
    until(lambda: all(each.returncode is not None for each in running), "\n\n".join(each.output for each in running), within_s=2 * START_S)
    return [each.returncode for each in running]


def test_other_data_and_another_torch_are_named_with_their_host(submit: Callable[..., Submitted]) -> None:
    run = submit("trainer.max_steps=3")
    folder = run.project.folder
    run.hosts[2].must("mount", "--bind", f"{folder}/other/images.bin", f"{folder}/data/images.bin")
    good = [run.start(host) for host in (0, 1)]
    run.arrives(1, good)
    bad = run.start(2, {"PYTHONPATH": f"{folder}/packages"})
    run.arrives(2, [*good, bad])
    run.names(["version of torch: '9.9' on node2", "data.root: images.bin has the same size but different content: sample"], [*good, bad])
    assert codes([*good, bad]) == [78, 78, 78]
    report = load_report(run.run_folder.failure)
    assert report is not None and "node2 is refused" in report.message, report


def test_other_code_is_named_with_its_host(submit: Callable[..., Submitted]) -> None:
    run = submit("trainer.max_steps=3")
    run.hosts[2].must("mount", "--bind", f"{run.project.folder}/other/mine.py", f"{run.run_folder.code}/mine.py")
    good = [run.start(host) for host in (0, 1)]
    run.arrives(1, good)
    bad = run.start(2)
    until(lambda: "the run's code on node2 is not what was submitted: mine.py" in bad.output, "named", within_s=START_S)
    run.names(["of 3 machines machine 2 (node2) is missing; here: node0, node1"], good)  # where no srun ends them for it
    assert codes([bad]) == [78]
    report = load_report(run.run_folder.failure)
    assert report is not None and report.host == "node2" and report.exit_code == 78, report
    for each in good:
        each.signal(15)
    codes(good)


def test_a_host_that_is_a_minute_late_is_named_meanwhile_and_taken_in(submit: Callable[..., Submitted]) -> None:
    run = submit("trainer.max_steps=3")
    good = [run.start(host) for host in (0, 1)]
    run.arrives(1, good)
    run.names(["waiting: of 3 machines machine 2 (node2) is missing; here: node0, node1"], good)
    time.sleep(60)
    assert all(each.returncode is None for each in good), good[0].output + good[1].output
    assert codes([*good, run.start(2)]) == [0, 0, 0], good[0].output
    assert run.run_folder.is_completed() and len(metrics(run.run_folder.root, "train")) == 3


def test_a_killed_rank_counts_the_same_on_all_hosts(submit: Callable[..., Submitted]) -> None:
    kills = "+debug.faults=[{kind:kill,rank:1,step:3},{kind:kill,rank:2,step:5,attempt:1}]"
    run = submit("trainer.max_steps=8", "cluster.max_restarts=3", "checkpoint.every_steps=2", kills)
    running = [run.start(host) for host in range(3)]
    assert codes(running) == [0, 0, 0], running[0].output
    told = (run.project.folder / "counts.txt").read_text().splitlines()
    assert sorted(told) == sorted(f"node{host} {host} {restarts} 3" for host in range(3) for restarts in range(3)), told
    assert [record["step"] for record in metrics(run.run_folder.root, "train")] == list(range(1, 9))
