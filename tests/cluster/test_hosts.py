"""Several machines by hand, on hosts with names, addresses and cables of their own: how they agree, and what happens when one is lost."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.machine import Running, until
from tests.cluster.slurm import Slurm
from tests.conftest import TINY, Project, metrics

pytestmark = pytest.mark.cluster

SLOW = """
import time
from ddp_train.model.mlp import MLP

class Slow(MLP):
    def forward(self, images):
        time.sleep(0.2 * self.training)
        return super().forward(images)
"""
BY_HAND = [*TINY, "cluster=machines", "cluster.device=cpu", "cluster.processes_per_node=1", "cluster.rendezvous_endpoint=node0:29400"]
LONG = ["model._target_=slow.Slow", "trainer.max_epochs=100", "trainer.global_batch_size=64", "checkpoint.every_steps=5"]
START_S = 60.0  # a run's first step, on a machine that does other things too
ENDED_S = 30.0  # from the loss of a machine to the end of everything, or to the next step; on a quiet machine half of it
BACK_S = 40.0  # from the cable to a step with all; the same


@dataclass
class Together:
    """The same command on several hosts."""

    hosts: Hosts
    project: Project
    words: list[str]

    def start(self, host: int, *more: str, env: dict[str, str] | None = None, clock_s: float = 0) -> Running:
        command = [sys.executable, "-m", "ddp_train", *self.words, *more]
        return self.hosts.start(host, *command, cwd=self.project.folder, env=env, clock_s=clock_s)

    def start_all(self) -> list[Running]:
        return [self.start(host) for host in range(len(self.hosts))]

    def last_step(self) -> int:
        runs = [run for run in self.project.runs() if (run / "metrics.jsonl").exists()]
        return max([record["step"] for run in runs for record in metrics(run)], default=0)

    def takes_steps(self, count: int, *, within_s: float, of: Sequence[Running]) -> float:
        """Wait until so many more steps are taken, and return how long that took."""
        before, began = self.last_step(), time.monotonic()
        until(lambda: self.last_step() >= before + count, "\n\n".join(each.output[-3000:] for each in of), within_s=within_s)
        return time.monotonic() - began

    def attempts(self, first: Running, ranks: int) -> int:
        """Return how many attempts with so many ranks the first machine has seen begin."""
        return first.output.count(f"ranks    {ranks} on cpu")


@pytest.fixture
def together(project: Project, hosts: Callable[[int], Hosts]) -> Callable[..., Together]:
    """Boot hosts, for a command over as many machines as are said."""

    def make(count: int, *words: str, nodes: str = "") -> Together:
        project.write("slow.py", SLOW)
        return Together(hosts(count), project, [*BY_HAND, f"cluster.nodes={nodes or count}", *words])

    return make


def ended(running: Sequence[Running], *, within_s: float) -> list[int | None]:
    """Wait for the end of commands and return their exit codes."""
    until(
        lambda: all(each.returncode is not None for each in running),
        "\n\n".join(each.output[-3000:] for each in running),
        within_s=within_s,
    )
    return [each.returncode for each in running]


def steps_are_whole(run: Path) -> None:
    """Check that no step is there twice, and none is missing."""
    steps = [record["step"] for record in metrics(run, "train")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.cluster_long
def test_the_machine_of_the_endpoint_is_the_first_and_all_end_with_one_code(together: Callable[..., Together]) -> None:
    run = together(2, "trainer.max_steps=3")
    late, first = run.start(1), run.start(0)
    assert ended([late, first], within_s=START_S) == [0, 0], first.output + late.output
    assert run.attempts(first, 2) == 1
    assert json.loads((run.project.the_run() / "result.json").read_text())["status"] == "completed"
    resumed = [
        run.hosts.start(
            host, sys.executable, "-m", "ddp_train", "resume", str(run.project.the_run()), "trainer.max_steps=5", cwd=run.project.folder
        )
        for host in (1, 0)
    ]
    assert ended(resumed, within_s=START_S) == [0, 0], resumed[1].output
    steps_are_whole(run.project.the_run())
    assert run.last_step() == 5


def test_who_differs_is_refused_alone_by_name_and_the_first_goes_on_waiting(together: Callable[..., Together]) -> None:
    run = together(2, "trainer.max_steps=3")
    first = run.start(0)
    for more, env, said in (
        (["optimizer.lr=0.5"], {}, r"optimizer\.lr: 0\.5 on node1, \S+ on node0"),
        (["cluster.nodes=3"], {}, r"cluster\.nodes: 3 on node1, 2 on node0"),
        ([], {"GLOO_SOCKET_IFNAME": "eth7"}, r"GLOO_SOCKET_IFNAME=eth7 names eth7, which does not exist"),
        (["cluster.rendezvous_id=another"], {}, r"it belongs to another run"),
    ):
        other = run.start(1, *more, env=env)
        assert ended([other], within_s=START_S) == [78], other.output
        assert re.search(said, other.output), other.output
        until(lambda said=said: re.search(said, first.output) is not None, said, within_s=2)  # type: ignore[misc]
    until(lambda: "waiting: of 2 machines" in first.output, "who is missing is said", within_s=START_S)
    skewed = run.start(1, clock_s=60)  # to the end it would not do: libfaketime lets some sleeps fail
    said = r"warning: the clock of node1 is (59|60)\.\d s ahead of that of node0"
    until(lambda: re.search(said, first.output) is not None, "the clock is named", within_s=START_S)
    first.signal(signal.SIGTERM)
    ended([first, skewed], within_s=ENDED_S)


@pytest.mark.parametrize("cut", ["unplug", pytest.param("drop", marks=pytest.mark.cluster_long)])
def test_a_lost_machine_is_named_and_everything_ends_its_own_ranks_too(together: Callable[..., Together], cut: str) -> None:
    run = together(3, *LONG)
    running = run.start_all()
    run.takes_steps(3, within_s=START_S, of=running)
    getattr(run.hosts, cut)(2)
    began = time.monotonic()
    codes = ended(running, within_s=ENDED_S)
    print(f"{cut}: all ended after {time.monotonic() - began:.1f} s")  # -s shows it
    assert codes == [1, 1, 1], "\n\n".join(each.output for each in running)
    assert [run.hosts.processes(host) for host in range(3)] == [[], [], []]
    report = json.loads((run.project.the_run() / "failure.json").read_text())
    assert (report["host"], report["error"]) == ("node2", "MachineLost") and "has been silent for 6 s" in report["message"]
    for survivor in running[:2]:
        assert "node2 has been silent for 6 s" in survivor.output, survivor.output
    assert "node0 has been silent for 6 s; the ranks of this machine are stopped" in running[2].output


@pytest.mark.cluster_long
@pytest.mark.parametrize("cut", ["unplug", "drop"])
def test_an_elastic_run_goes_on_without_a_machine_and_takes_it_back(together: Callable[..., Together], cut: str) -> None:
    run = together(3, *LONG, "cluster.max_restarts=3", nodes="1:3")
    running = run.start_all()
    until(lambda: run.last_step() > 2 and run.attempts(running[0], 3) == 1, "three machines train", within_s=START_S)
    getattr(run.hosts, cut)(2)
    began = time.monotonic()
    until(lambda: run.attempts(running[0], 2) == 1, "two machines train", within_s=ENDED_S)
    run.takes_steps(1, within_s=ENDED_S, of=running)
    print(f"{cut}: goes on after {time.monotonic() - began:.1f} s")
    assert "restart 1 of 3 from" in running[0].output
    run.hosts.plug(2) if cut == "unplug" else run.hosts.pass_all(2)
    began = time.monotonic()
    until(lambda: run.attempts(running[0], 3) == 2, "three machines train again", within_s=BACK_S)
    run.takes_steps(1, within_s=BACK_S, of=running)
    print(f"{cut}: back after {time.monotonic() - began:.1f} s")
    assert "the set of machines changed; 3 ranks continue from" in running[0].output and "restart 2" not in running[0].output
    running[1].signal(signal.SIGTERM)
    assert ended(running, within_s=ENDED_S) == [75, 75, 75], "\n\n".join(each.output for each in running)
    steps_are_whole(run.project.the_run())


@pytest.mark.cluster_long
def test_a_first_machine_that_dies_is_named_by_the_others(together: Callable[..., Together]) -> None:
    run = together(3, *LONG, "cluster.max_restarts=2")
    running = run.start_all()
    run.takes_steps(3, within_s=START_S, of=running)
    run.hosts.kill(0)
    codes = ended(running[1:], within_s=ENDED_S)
    assert codes == [1, 1], running[1].output
    assert all("node0 ended its node program" in each.output for each in running[1:]), running[1].output
    assert json.loads((run.project.the_run() / "failure.json").read_text())["host"] == "node0"


@pytest.mark.cluster_long
def test_a_fixed_run_waits_for_a_machine_and_goes_on_with_it(together: Callable[..., Together]) -> None:
    run = together(2, *LONG, "cluster.max_restarts=1")
    running = run.start_all()
    run.takes_steps(3, within_s=START_S, of=running)
    run.hosts.unplug(1)
    until(
        lambda: "waiting: of 2 machines node1 (has been silent for 6 s) is missing" in running[0].output, "the first says so", within_s=30
    )
    assert "this machine tries to rejoin for at most 300 s" in running[1].output
    run.hosts.plug(1)
    run.takes_steps(1, within_s=BACK_S, of=running)
    running[0].signal(signal.SIGINT)
    assert ended(running, within_s=ENDED_S) == [130, 130], running[0].output + running[1].output
    steps_are_whole(run.project.the_run())


@pytest.mark.cluster_long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_stop_signal_on_any_machine_saves_and_ends_all(together: Callable[..., Together], number: signal.Signals, code: int) -> None:
    run = together(2, *LONG)
    running = run.start_all()
    run.takes_steps(3, within_s=START_S, of=running)
    running[1].signal(number)
    assert ended(running, within_s=ENDED_S) == [code, code], running[0].output + running[1].output
    result = json.loads((run.project.the_run() / "result.json").read_text())
    assert result["status"] == ("interrupted" if code == 130 else "preempted") and result["step"] > 2


@pytest.mark.cluster_long
def test_when_the_time_is_up_every_machine_says_so(together: Callable[..., Together]) -> None:
    run = together(2, *LONG, "cluster.walltime=1", "cluster.grace_s=35")
    running = run.start_all()
    assert ended(running, within_s=START_S + 30) == [75, 75], running[0].output


@pytest.mark.cluster_long
def test_two_runs_that_are_resumed_at_one_endpoint_do_not_become_one(together: Callable[..., Together]) -> None:
    """Their configs are equal: one would train on both machines, and the other be left as it was, without a word."""
    run = together(2, "trainer.max_steps=3")
    for name in "ab":
        assert ended([run.start(host, f"hydra.run.dir=outputs/{name}") for host in (0, 1)], within_s=START_S) == [0, 0]

    def resume(host: int, name: str) -> Running:
        words = ["resume", f"outputs/{name}", "trainer.max_steps=5", "cluster.join_timeout_s=20"]
        return run.hosts.start(host, sys.executable, "-m", "ddp_train", *words, cwd=run.project.folder)

    first = resume(0, "a")
    other = resume(1, "b")
    assert ended([other], within_s=START_S) == [78], other.output
    assert re.search(r"another run is there: /\S+/outputs/a; node1 wants /\S+/outputs/b", other.output), other.output
    second = resume(1, "a")
    assert ended([first, second], within_s=START_S) == [0, 0], first.output + second.output
    assert re.search(r"joined /\S+/outputs/a, whose first machine is node0", second.output), second.output
    assert [metrics(run.project.folder / "outputs" / name)[-1]["step"] for name in "ab"] == [5, 3]


@pytest.mark.cluster_long
def test_two_jobs_at_one_endpoint_do_not_become_one(together: Callable[..., Together]) -> None:
    run = together(2, "trainer.max_steps=3")
    first = run.start(0)
    until(lambda: "waiting" in first.output, first.output, within_s=START_S)
    others = [run.start(host, "optimizer.lr=0.5", "cluster.join_timeout_s=5") for host in (0, 1)]
    assert ended(others, within_s=START_S) == [78, 78], others[0].output
    assert all("refuses this machine" in each.output and "optimizer.lr" in each.output for each in others)
    second = run.start(1)
    assert ended([first, second], within_s=START_S) == [0, 0], first.output
    assert len(run.project.runs()) == 1


@pytest.mark.cluster_long
def test_in_a_step_of_slurm_nothing_has_to_be_said_and_two_jobs_do_not_meet(project: Project, slurm_hosts: Callable[..., Slurm]) -> None:
    bed = slurm_hosts(2)
    words = [sys.executable, "-m", "ddp_train", *TINY, "cluster=machines", "cluster.device=cpu", "cluster.processes_per_node=1", "seed=1"]
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *words, "trainer.max_steps=3"]
    jobs = [bed.start(*srun, f"hydra.run.dir=outputs/{name}", cwd=project.folder) for name in ("one", "two")]
    assert ended(jobs, within_s=2 * START_S) == [0, 0], jobs[0].output + jobs[1].output
    first, second = ([record["loss"] for record in metrics(project.folder / "outputs" / name, "train")] for name in ("one", "two"))
    assert first == second and len(first) == 3
    assert all(job.output.count("ranks    2 on cpu") == 1 for job in jobs)


def test_several_tasks_of_srun_that_would_each_train_alone_are_refused(project: Project, slurm: Callable[..., Slurm]) -> None:
    done = slurm(2).run("srun", "--nodes=2", sys.executable, "-m", "ddp_train", *TINY, "trainer.max_steps=2", cwd=project.folder)
    assert done.returncode == 2 and project.runs() == [], done.output
    assert done.output.count("SLURM_STEP_NUM_TASKS=2 says that srun has started 2 of this command") == 2, done.output
    assert "fix: srun --ntasks-per-node=1 ddp-train cluster=machines ..." in done.output


@pytest.mark.parametrize("far", [1, 0])
def test_a_machine_with_a_slow_network_is_named(together: Callable[..., Together], far: int) -> None:
    run = together(3, "trainer.max_epochs=1000", "trainer.max_steps=3000", "trainer.log_every_steps=5", "checkpoint.every_steps=null")
    run.hosts.move_away(far, 0.02)
    ranks = run.start_all()
    said = f" on node{far} by its network: all wait for messages"  # which rank it has depends on who comes first
    until(lambda: said in ranks[0].output, f"{said}: {ranks[0].output[-3000:]}", within_s=2 * START_S)
    assert ranks[0].output.count("slow     ") == 1
    ranks[0].signal(signal.SIGINT)
    ended(ranks, within_s=ENDED_S)
    [event] = [json.loads(line) for line in (run.project.the_run() / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["host"], event["cause"]) == ("slow_rank", f"node{far}", "network")
