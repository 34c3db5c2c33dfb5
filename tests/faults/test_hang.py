"""A rank that does not move any more, or is gone, is named by its own number within seconds, with its stack; and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Finished, Project, finish, metrics, wait_for
from tests.faults.misbehaving import DEATHS, HANGS

pytestmark = pytest.mark.distributed

TIMEOUT_S = 3
COMMON = [
    "trainer.log_every_steps=1",
    "trainer.max_steps=100000",
    "trainer.max_epochs=null",
    "~metrics.tensorboard",
    "cluster=cpu",
    "cluster.processes_per_node=3",
    f"cluster.step_timeout_s={TIMEOUT_S}",
]
MODEL = ["model._target_=tests.faults.misbehaving.Model", "~model.image_shape", "~model.width", "~model.depth", "data.eval=null"]
MODEL += ["sanity_check=false"]  # which is forward, too
IMAGES = [
    "model=mlp",
    "model.width=8",
    "data._target_=tests.faults.misbehaving.Images",
    *(f"~data.{key}" for key in ("split", "image_size", "channels", "num_classes", "noise", "seed")),
    "data.num_samples=600",
    "data.eval=null",
]


def model(fault: str, rank: int, call: int = 3) -> list[str]:
    return ["model=mlp", *MODEL, f"+model.fault={fault}", f"+model.rank={rank}", f"+model.call={call}", *COMMON]


def images(fault: str, at: int) -> list[str]:
    return [*IMAGES, f"+data.fault={fault}", f"+data.at={at}", *COMMON]


def check(project: Project, done: Finished, *, within_s: float) -> dict[str, Any]:
    """Check what holds for every fault, and return failure.json."""
    moment = json.loads((project.folder / "moment").read_text())
    report = project.the_run() / "failure.json"
    found: dict[str, Any] = json.loads(report.read_text())
    seconds = report.stat().st_mtime - moment["time"]  # the screen follows at once
    assert done.returncode == (2 if found["error"] == "DataError" else 1), done.output
    assert done.output.count("The run failed: ") == 1, done.output
    screen = done.output[done.output.index("The run failed: ") :]
    print(f"named after {seconds:.2f} s in {sum(map(bool, screen.splitlines()))} lines: {found['message']}")
    assert found["rank"] == int(moment["rank"]), done.output
    assert f"rank {found['rank']} on {found['host']} (pid {found['pid']})" in done.output
    assert seconds < within_s, done.output
    return found


def test_a_rank_that_hangs_is_named_with_its_stack_and_ended(project: Project) -> None:
    """With Python's lock held for ever no thread of that rank can say anything; the long tests have the other kinds."""
    done = project.run(*model("hold_the_interpreters_lock", rank=1))
    found = check(project, done, within_s=TIMEOUT_S + 2)
    assert found["error"] == "Hang"
    assert re.search(r"in forward, misbehaving.py:\d+ in hold_the_interpreters_lock", done.output)
    (others,) = found["others"]
    assert re.fullmatch(r"ranks 0, 2   in backward, train_step.py:\d+ in backward \(phase step\)", others)
    assert "in hold_the_interpreters_lock\n    re.match(" in done.output
    assert "in hold_the_interpreters_lock" in (project.the_run() / "logs/stacks_rank_00001.txt").read_text()


@pytest.mark.long
def test_a_run_that_somebody_suspends_goes_on(project: Project) -> None:
    process = project.start(*TINY, "cluster=cpu", "cluster.step_timeout_s=2", "trainer.max_steps=100000", "trainer.max_epochs=null")
    run = wait_for_steps(project, process)
    everybody = [int(each.name) for each in Path("/proc").glob("[0-9]*") if stands_in(project.folder, each)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    before = len(metrics(run))
    wait_for(lambda: len(metrics(run)) > before + 3)
    time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130


def wait_for_steps(project: Project, process: subprocess.Popen[str]) -> Path:
    wait_for(lambda: process.poll() is not None or any(len(metrics(run)) > 3 for run in project.runs() if (run / "metrics.jsonl").exists()))
    return project.the_run()


def stands_in(folder: Path, process: Path) -> bool:
    try:
        return (process / "cwd").resolve() == folder.resolve()
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", [*HANGS, "worker", "stopped worker"])
def test_hangs_of_every_kind_are_named(project: Project, fault: str, seed: int) -> None:
    draw = random.Random(f"{fault} {seed}")
    ranks, rank, call = draw.choice([3, 4]), draw.randrange(3), draw.randrange(2, 20)
    print(f"{fault} seed {seed}: {ranks} ranks, rank {rank}, call {call}")
    if "worker" in fault:
        arguments = [*images("stop" if "stopped" in fault else "sleep", at=draw.randrange(600)), "loader.num_workers=1"]
    else:
        arguments = model(fault, rank, call)
    done = project.run(*arguments, f"cluster.processes_per_node={ranks}", "cluster.start_timeout_s=60")
    found = json.loads((project.the_run() / "failure.json").read_text())
    check(project, done, within_s=(TIMEOUT_S if found["step"] else 60) + 2)  # a worker may read ahead of the first step
    assert found["error"] == "Hang"
    if "worker" in fault:
        assert "waits for its loader worker" in found["message"]
        assert "while it reads TrainRequest(" in found["message"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", DEATHS)
def test_deaths_of_every_kind_are_named_at_once(project: Project, fault: str, seed: int) -> None:
    draw = random.Random(f"{fault} {seed}")
    ranks, rank, call = draw.choice([3, 4]), draw.randrange(3), draw.randrange(2, 20)
    print(f"{fault} seed {seed}: {ranks} ranks, rank {rank}, call {call}")
    arguments = images(fault, at=draw.randrange(600)) if fault == "end" else model(fault, rank, call)
    done = project.run(*arguments, f"cluster.processes_per_node={ranks}", "cluster.step_timeout_s=300")
    check(project, done, within_s=1)
    screen = done.output[done.output.index("The run failed: ") :]
    assert sum(map(bool, screen.splitlines())) <= 15, screen
