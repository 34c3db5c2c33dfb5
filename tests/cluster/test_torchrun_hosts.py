"""Two machines, each with its own real torchrun: what the guides teach, and what becomes of it when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_train import FOLDER
from tests.cluster.hosts import Hosts
from tests.cluster.machine import Running, until
from tests.cluster.slurm import Slurm
from tests.cluster.test_hosts import LONG, SLOW, START_S, ended, steps_are_whole
from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.cluster

BESIDE = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
STOPPED_S = 20.0  # from a signal to the end of both agents; torch alone would wait for 300 s
RESTARTED_S = 90.0
SLOWLY = [*TINY, *LONG]
C10D = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=run"]
STATIC = ["--master-addr=node0", "--master-port=29500"]


@dataclass
class Agents:
    """The same torchrun on several hosts."""

    hosts: Hosts
    project: Project

    def start(
        self, host: int, meet: Sequence[str], *words: str, nodes: str = "2", processes: int = 2, cwd: Path | None = None, restarts: int = 0
    ) -> Running:
        options = [f"--nnodes={nodes}", f"--nproc-per-node={processes}", f"--max-restarts={restarts}", *meet]
        options += [f"--node-rank={host}"] if meet is STATIC else []
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if ":" in nodes else {}
        command = [sys.executable, *("-m", "torch.distributed.run"), *options, "-m", "ddp_train", *words]
        return self.hosts.start(host, *command, cwd=cwd or self.project.folder, env=env)

    def last_step(self) -> int:
        runs = [run for run in self.project.runs() if (run / "metrics.jsonl").exists()]
        return max([record["step"] for run in runs for record in metrics(run)], default=0)

    def takes_steps(self, count: int, *, within_s: float, of: Sequence[Running]) -> None:
        until(lambda: self.last_step() >= count, "\n\n".join(each.output[-3000:] for each in of), within_s=within_s)

    def kill_rank(self, host: int, rank: int) -> None:
        log = (self.project.the_run() / f"logs/rank_{rank:05d}.log").read_text()
        pid = re.findall(r"begins \(pid (\d+)\)", log)[-1]  # as the host counts
        assert self.hosts.run(host, "kill", "-KILL", pid).returncode == 0


@pytest.fixture
def agents(project: Project, hosts: Callable[[int], Hosts]) -> Agents:
    project.write("slow.py", SLOW)
    return Agents(hosts(2), project)


def check_stopped(agents: Agents, running: list[Running]) -> None:
    """Check that both torchruns end at once and none says that the run is finished."""
    assert ended(running, within_s=STOPPED_S) == [1, 1], running[0].output
    result = json.loads((agents.project.the_run() / "result.json").read_text())
    assert result["status"] == "preempted" and result["step"] > 2
    assert "stopped after step" in running[0].output and "torchrun now ends by SIGTERM with exit code 1" in running[0].output


def test_the_script_of_each_machine_is_stopped_on_one_and_the_run_goes_on_by_another_rendezvous(agents: Agents) -> None:
    variables = {"NNODES": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "NPROC_PER_NODE": "1", "PATH": BESIDE}
    script = ["bash", str(FOLDER.parent / "launch/multinode.sh"), *SLOWLY]
    running = [agents.hosts.start(host, *script, cwd=agents.project.folder, env={**variables, "NODE_RANK": f"{host}"}) for host in range(2)]
    agents.takes_steps(4, within_s=START_S, of=running)
    running[1].signal(signal.SIGTERM)
    check_stopped(agents, running)
    more = ["resume", str(agents.project.the_run()), "trainer.max_epochs=null", f"trainer.max_steps={agents.last_step() + 3}"]
    running = [agents.start(host, C10D, *more, processes=1) for host in range(2)]
    assert ended(running, within_s=START_S) == [0, 0], running[0].output
    steps_are_whole(agents.project.the_run())


def test_a_machine_with_other_words_code_or_data_is_named_and_nothing_is_trained(agents: Agents) -> None:
    other = agents.project.folder / "other"
    other.mkdir()
    for folder in (agents.project.folder, other):
        (folder / "mine.py").write_text(f"FOLDER = {str(folder)!r}\n")
        (folder / "text.txt").write_text(f"{'of the other' if folder == other else 'of the first'} one, as long as it\n" * 200)
    words = ["data=char_text", "data.path=text.txt", "model=gpt", "objective=language_modeling", "trainer.max_steps=2"]
    running = [
        agents.start(0, STATIC, *words, "seed=1", processes=1),
        agents.start(1, STATIC, *words, "seed=2", processes=1, cwd=other),
    ]
    assert ended(running, within_s=START_S) == [1, 1], running[0].output
    for said in (
        r"the command line: '.* seed=2' on node1, '.* seed=1' on node0",
        r"code: mine\.py: \w+ on node1",
        r"data\.path: the file has the same size but different content",
    ):
        assert all(re.search(said, each.output) for each in running), running[0].output
    assert json.loads((agents.project.the_run() / "failure.json").read_text())["exit_code"] == 78
    assert agents.last_step() == 0


@pytest.mark.cluster_long
@pytest.mark.parametrize("meet", [STATIC, C10D], ids=["static", "c10d"])
def test_a_killed_rank_starts_again_on_both_machines(agents: Agents, meet: list[str]) -> None:
    words = [*SLOWLY, "trainer.max_epochs=null", "trainer.max_steps=25"]
    running = [agents.start(host, meet, *words, restarts=2) for host in range(2)]
    agents.takes_steps(7, within_s=START_S, of=running)
    agents.kill_rank(1, 3)
    assert ended(running, within_s=RESTARTED_S) == [0, 0], running[0].output
    run = agents.project.the_run()
    steps_are_whole(run)
    assert agents.last_step() == 25 and (run / "failure.1.json").exists()
    assert re.search(r"restart [01] of 2 from step", running[0].output), running[0].output  # each torchrun counts its own


@pytest.mark.cluster_long
@pytest.mark.parametrize(("host", "number"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_to_one_torchrun_stops_both_also_with_restarts_left(agents: Agents, host: int, number: signal.Signals) -> None:
    running = [agents.start(each, C10D, *SLOWLY, restarts=2) for each in range(2)]
    agents.takes_steps(4, within_s=START_S, of=running)
    running[host].signal(number)
    assert ended(running, within_s=STOPPED_S) == [1, 1], running[0].output
    assert "restart 1" not in running[0].output and "stopped after step" in running[0].output
    assert json.loads((agents.project.the_run() / "result.json").read_text())["status"] in ("preempted", "interrupted")


@pytest.mark.cluster_long
def test_when_the_time_is_up_no_torchrun_says_that_the_run_is_finished(agents: Agents) -> None:
    running = [agents.start(host, STATIC, *SLOWLY, "cluster.walltime=1", "cluster.grace_s=35") for host in range(2)]
    ended(running, within_s=START_S + 30)
    check_stopped(agents, running)


@pytest.mark.cluster_long
@pytest.mark.parametrize("meet", [STATIC, C10D], ids=["static", "c10d"])
def test_a_sweep_trains_each_job_on_both_machines(agents: Agents, meet: list[str]) -> None:
    running = [agents.start(host, meet, "-m", "seed=1,2", *TINY, "trainer.max_steps=3") for host in range(2)]
    assert ended(running, within_s=START_S) == [0, 0], running[0].output
    runs = agents.project.runs()
    assert [run.name for run in runs] == ["0", "1"] and len({run.parent for run in runs}) == 1
    for run in runs:
        steps_are_whole(run)
        assert json.loads((run / "environment.json").read_text())["world_size"] == 4


@pytest.mark.cluster_long
@pytest.mark.parametrize("host", [0, 1])
def test_a_sweep_that_is_stopped_on_one_machine_ends_both_torchruns(agents: Agents, host: int) -> None:
    running = [agents.start(each, C10D, "-m", "seed=1,2", *SLOWLY) for each in range(2)]
    agents.takes_steps(4, within_s=START_S, of=running)
    running[host].signal(signal.SIGTERM)
    assert ended(running, within_s=STOPPED_S) == [1, 1], running[0].output
    assert "2 of 2 jobs are not completed" in running[0].output


@pytest.mark.cluster_long
def test_an_elastic_run_takes_a_machine_in_and_goes_on_when_it_leaves(agents: Agents) -> None:
    words = [*SLOWLY, "trainer.max_epochs=null", "trainer.max_steps=150"]
    first = agents.start(0, C10D, *words, nodes="1:2", processes=1, restarts=5)
    agents.takes_steps(3, within_s=START_S, of=[first])
    second = agents.start(1, C10D, *words, nodes="1:2", processes=1, restarts=5)
    until(lambda: "2 ranks continue from step" in first.output, first.output, within_s=START_S)
    agents.takes_steps(agents.last_step() + 3, within_s=START_S, of=[first, second])
    second.kill()
    agents.takes_steps(agents.last_step() + 3, within_s=2 * RESTARTED_S, of=[first])
    assert ended([first], within_s=RESTARTED_S) == [0], first.output
    steps_are_whole(agents.project.the_run())
    assert agents.last_step() == 150


@pytest.mark.cluster_long
def test_a_step_of_slurm_starts_a_torchrun_on_each_machine(project: Project, slurm_hosts: Callable[..., Slurm]) -> None:
    bed = slurm_hosts(2)
    torchrun = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID -m ddp_train"
    line = f'exec torchrun --rdzv-endpoint=$(scontrol show hostnames | head -n 1):29400 {torchrun} "$@"'
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", line, "bash", *TINY, "trainer.max_steps=3"]
    job = bed.start(*srun, cwd=project.folder, env={"PATH": BESIDE})
    assert ended([job], within_s=2 * START_S) == [0], job.output
    assert json.loads((project.the_run() / "environment.json").read_text())["world_size"] == 4
    steps_are_whole(project.the_run())
