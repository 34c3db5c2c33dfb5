"""Runs over real SSH: three machines train as one, and nothing of a run outlives the command that started it."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cluster.machine import Running, until
from tests.cluster.sshd import SshHosts
from tests.conftest import TINY, Project, metrics, wait_for

pytestmark = pytest.mark.cluster

THREE = [*TINY, "cluster=ssh", "cluster.device=cpu", "cluster.hosts=[node1:2,node2,node3]", "cluster.processes_per_node=1"]
LONG = ["model._target_=slow.Slow", "trainer.max_steps=1000", "trainer.max_epochs=null"]
SLOW = """
import time
from ddp_train.model.mlp import MLP

class Slow(MLP):
    def forward(self, images):
        time.sleep(0.05 * self.training)
        return super().forward(images)
"""


def start(hosts: SshHosts, project: Project, *arguments: str) -> Running:
    """Type a command on host 0, which takes no part itself."""
    return hosts.start(0, *project.command(*arguments), cwd=project.folder)


def train(hosts: SshHosts, project: Project) -> Running:
    """Start a long run, and return when it has taken a few steps."""
    project.write("slow.py", SLOW)
    command = start(hosts, project, *THREE, *LONG)
    wait_for(lambda: command.returncode is not None or any(_steps(run) > 3 for run in project.runs()))
    assert command.returncode is None, command.output
    return command


def left(hosts: SshHosts) -> list[str]:
    """Return what runs on the machines of a run, but for their ssh daemons."""
    return [line for host in (1, 2, 3) for line in hosts.processes(host) if "sshd" not in line]


def _steps(run: Path) -> int:
    return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0


def test_three_machines_have_the_losses_of_one(ssh_hosts: Callable[[int], SshHosts], project: Project) -> None:
    done = start(ssh_hosts(4), project, *THREE, "trainer.max_steps=8").finish()
    assert done.returncode == 0, done.output
    run = project.the_run()
    assert "[node2]" not in done.stdout  # only the first machine has something to say
    assert json.loads((run / "environment.json").read_text())["world_size"] == 4
    alone = project.run(*TINY, "cluster=cpu", "cluster.processes_per_node=4", "trainer.max_steps=8")
    assert alone.returncode == 0, alone.output
    (other,) = [each for each in project.runs() if each != run]
    for mine, its in zip(metrics(run), metrics(other), strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-5)


@pytest.mark.cluster_long
def test_nothing_outlives_a_command_that_is_killed_and_the_run_is_saved(ssh_hosts: Callable[[int], SshHosts], project: Project) -> None:
    hosts = ssh_hosts(4)
    command = train(hosts, project)
    command.signal(signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: not left(hosts), "nothing is left", within_s=5)
    print(f"nothing is left after {time.monotonic() - killed:.1f} s")  # -s shows it
    run = project.the_run()
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"
    verdict = project.run("verdict", str(run))
    assert verdict.returncode == 75, verdict.output
    steps = _steps(run)
    again = start(hosts, project, "resume", str(run), f"trainer.max_steps={steps + 5}").finish()
    assert again.returncode == 0, again.output
    assert [record["step"] for record in metrics(run, "train")] == list(range(1, steps + 6))


@pytest.mark.cluster_long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_ctrl_c_and_a_terminal_that_is_closed_save_everywhere(
    ssh_hosts: Callable[[int], SshHosts], project: Project, number: int, code: int
) -> None:
    hosts = ssh_hosts(4)
    command = train(hosts, project)
    command.signal(number)
    done = command.finish(timeout=20)
    assert done.returncode == code, done.output
    assert list((project.the_run() / "checkpoints").glob("step_*"))
    assert left(hosts) == []


@pytest.mark.cluster_long
def test_a_run_is_cancelled_from_another_shell(ssh_hosts: Callable[[int], SshHosts], project: Project) -> None:
    hosts = ssh_hosts(4)
    command = train(hosts, project)
    run = project.the_run()
    assert "running" in start(hosts, project, "status", str(run)).finish().stdout
    cancelled = start(hosts, project, "cancel", str(run)).finish()
    assert cancelled.returncode == 0 and "cancelled" in cancelled.stdout, cancelled.output
    assert command.finish(timeout=20).returncode == 130, command.output
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"
    assert "never: cancelled" in project.run("verdict", str(run)).stdout
    assert left(hosts) == []


@pytest.mark.cluster_long
def test_a_node_program_that_is_killed_is_lost_at_once(ssh_hosts: Callable[[int], SshHosts], project: Project) -> None:
    hosts = ssh_hosts(4)
    command = train(hosts, project)
    hosts[3].must("pkill", "-KILL", "-f", "ddp_train node")
    done = command.finish(timeout=60)
    assert done.returncode == 1 and "node3" in done.output, done.output
    assert left(hosts) == []


@pytest.mark.cluster_long
def test_a_machine_that_cannot_take_part_is_named_before_anything_trains(ssh_hosts: Callable[[int], SshHosts], project: Project) -> None:
    hosts = ssh_hosts(4)
    hosts[3].must("mount", "-t", "tmpfs", "tmpfs", str(project.folder))
    for changes, said in (
        ([], "node3 does not see the run folder"),
        (["cluster.hosts=[node1,node2,nowhere]"], "nowhere cannot be reached by ssh"),
        (["cluster.hosts=[node1,node2]", "cluster.python=/opt/none"], "node2 does not have the Python"),
        (
            ["cluster.hosts=[node1,node2]", "cluster.setup=['echo no such module >&2; false']"],
            "failed in a line of cluster.setup: no such module; cluster.setup failed: ",
        ),
    ):
        done = start(hosts, project, *THREE, *changes).finish(timeout=60)
        assert done.returncode == 78, done.output
        assert said in done.output and "fix:" in done.output and "Traceback" not in done.output
    packages = str(Path(torch.__file__).parents[1])
    hosts[2].must("mount", "-t", "tmpfs", "tmpfs", packages)
    done = start(hosts, project, *THREE, "cluster.hosts=[node1,node2]").finish(timeout=60)
    assert done.returncode == 78 and re.search(r"node2 .* has no torch, hydra,", done.output), done.output
    hosts[2].must("umount", packages)
    assert not [run for run in project.runs() if (run / "metrics.jsonl").exists()]
    assert left(hosts) == []
    hosts[3].must("umount", str(project.folder))
    done = start(hosts, project, "resume", str(project.runs()[0]), "trainer.max_steps=2").finish()
    assert done.returncode == 0, done.output
