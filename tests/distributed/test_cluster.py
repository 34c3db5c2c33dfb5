"""Several agents: how they find each other, and what happens when one does not come, goes, and comes back."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
import yaml

from ddp_train.launch.job import Job
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.process import handles_signal
from tests.conftest import TINY, Project, finish, metrics, wait_for
from tests.unit.parts import checked

pytestmark = pytest.mark.distributed

TWO = [*TINY, "cluster=machines", "cluster.device=cpu", "cluster.processes_per_node=1"]
SLOW = """
import time
from ddp_train.model.mlp import MLP

class Slow(MLP):
    def forward(self, images):
        time.sleep(0.1 * self.training)
        return super().forward(images)
"""


def test_machines_meet_as_an_operators_environment_says(project: Project, free_port: int) -> None:
    environment = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port)}
    started = [project.start(*TWO, "trainer.max_steps=3", env={**environment, "PET_NODE_RANK": rank}) for rank in ("1", "0")]
    done = [finish(process) for process in started]
    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    run = project.the_run()
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3]


def test_a_machine_that_cannot_meet_the_others_says_where_and_ends_with_78(project: Project, free_port: int) -> None:
    endpoint = f"127.0.0.1:{free_port}"
    meeting = [*TWO, "cluster.nodes=2", f"cluster.rendezvous_endpoint={endpoint}", "cluster.join_timeout_s=1"]
    nobody_there = project.run(*meeting, "cluster.node_rank=1")
    assert project.runs() == []
    nobody_comes = project.run(*meeting, "cluster.node_rank=0")
    for done, said in (
        (nobody_there, f"the first machine did not answer within 1 s: cannot reach {endpoint}: Connection refused"),
        (nobody_comes, "fewer than 2 machines joined within 1 s: of 2 machines machine 1 is missing"),
    ):
        assert done.returncode == 78, done.output
        assert said in done.output
        assert "fix:" in done.output
        assert "Traceback" not in done.output and "frame #" not in done.output
    assert json.loads((project.the_run() / "failure.json").read_text())["exit_code"] == 78


@pytest.mark.long
def test_an_elastic_run_survives_a_machine_that_leaves_and_takes_it_back(project: Project, free_port: int) -> None:
    project.write("slow.py", SLOW)
    command = [*TWO, "model._target_=slow.Slow", "cluster.nodes=1:2", "cluster.max_restarts=3", "trainer.global_batch_size=64"]
    command += [f"cluster.rendezvous_endpoint=127.0.0.1:{free_port}", "checkpoint.every_steps=5", "trainer.max_epochs=5"]
    host = project.start(*command, "cluster.node_rank=0")
    time.sleep(0.5)
    guest = project.start(*command, "cluster.node_rank=1")

    def last_step() -> int:
        return max([record["step"] for run in project.runs() if (run / "metrics.jsonl").exists() for record in metrics(run)], default=0)

    wait_for(lambda: last_step() > 6)
    guest.kill()
    left = time.time()
    finish(guest)
    before = last_step()
    wait_for(lambda: (project.the_run() / "config.1.yaml").exists() and last_step() > before + 3)  # one rank now, another accumulation
    came = time.time()
    guest = project.start(*command, "cluster.node_rank=1")
    done = [finish(process) for process in (host, guest)]
    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    run = project.the_run()
    for event, since in (("left", left), ("came", came)):
        times = [record["time"] for record in metrics(run, "train") if record["time"] > since]
        pause = max(later - earlier for earlier, later in zip([since, *times], times, strict=False) if earlier < since + 60)
        print(f"a machine {event}: {pause:.1f} s without a step")  # -s shows it
    output = done[0].stdout + done[1].stdout
    assert re.search(r"ended its node program, or the connection was lost; lost with it: rank 1; restart 1 of 3 from step \d+", output)
    assert "the set of machines changed; 2 ranks continue from step" in output
    assert [record["step"] for record in metrics(run, "train")] == list(range(1, 51))  # none twice, none missing
    assert "global batch 64 = micro-batch 32 x 1 rank x accumulation 2" in output
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["global_batch_size"] == 64


@pytest.mark.long
def test_machines_that_an_engine_starts_run_what_their_spec_says(project: Project) -> None:
    run_folder = RunFolder(project.folder / "outputs/run")
    run_folder.root.mkdir(parents=True)
    job = Job(config=checked("trainer.max_steps=2"), run_folder=run_folder, command=["ddp-train"], overrides=[])
    run_folder.record_config(job.config.yaml())
    spec = Spec(job=job, engine="ssh", processes=(1, 1), min_nodes=2, working_directory=str(project.folder))
    command = ["node", str(spec.write())]
    early = [project.start(*command, f"--index={index}", "--launch=first") for index in (0, 1)]
    wait_for(lambda: all(handles_signal(process.pid, signal.SIGUSR1) for process in early))
    for process in early:  # it is still importing
        process.send_signal(signal.SIGUSR1)
    done = [finish(process) for process in early]
    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    verdict = project.run("verdict", str(run_folder.root))
    assert verdict.returncode == 75 and verdict.stdout.startswith("again: stopped in good order"), verdict.output
    started = [project.start(*command, f"--index={index}", "--launch=second") for index in (1, 0)]
    done = [finish(process) for process in started]
    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    assert project.run("verdict", str(run_folder.root)).stdout == "done\n"
    assert [record["step"] for record in metrics(run_folder.root, "train")] == [1, 2]
    assert list(run_folder.launch.glob("meeting_*")) == []
