"""What goes wrong on a rank ends the run within seconds, with one screen, exit code 1, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, Project, finish, metrics, our_processes, wait_for
from tests.unit.data_files import write_cifar_binary, write_mnist

pytestmark = pytest.mark.distributed

FRAGILE = """
import os, signal, time
from torch import nn

class Fragile(nn.Module):
    def __init__(self, num_classes, fault):
        super().__init__()
        self.fault, self.calls = fault, 0
        self.map = nn.Linear(3 * 16 * 16, num_classes)
    def forward(self, images):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            time.sleep(0.3)  # the others get as far as they can
            if self.fault == "raise":
                raise ValueError("the third forward of rank 1")
            if self.fault == "poison":
                return self.map(images.flatten(1)) * float("nan")
            if self.fault == "exit":
                os._exit(0)
            if self.fault == "sleep":
                time.sleep(100)
            if self.fault == "SIGABRT":  # as NCCL's watchdog does
                os.write(2, b"what():  watchdog thread terminated with exception: CUDA error: misaligned address\\n")
            if self.fault.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, self.fault))
        return self.map(images.flatten(1))
"""
USE_FRAGILE = [
    "model._target_=fragile.Fragile",
    "~model.image_shape",
    "~model.width",
    "~model.depth",
    "sanity_check=false",  # which is forward, too
    "cluster=cpu",
    "cluster.processes_per_node=3",
]


def screens(output: str) -> int:
    return output.count("The run failed: ")


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        pytest.param(
            "raise", "ValueError", "the third forward of rank 1", marks=pytest.mark.long
        ),  # under torchrun it is in the default suite
        ("SIGKILL", "SIGKILL", "ended by SIGKILL"),
        pytest.param("SIGSEGV", "SIGSEGV", "ended by SIGSEGV", marks=pytest.mark.long),
        pytest.param("SIGABRT", "SIGABRT", "after this line in its log: CUDA error: misaligned address", marks=pytest.mark.long),
        ("exit", "EarlyExit", "rank 1 exited with code 0 after step 2 while the others were still training"),
        pytest.param("poison", "NonFiniteLossError", "the training loss is nan", marks=pytest.mark.long),
    ],
)
def test_a_fault_on_one_rank_gives_one_screen_that_names_it(project: Project, fault: str, error: str, said: str) -> None:
    project.write("fragile.py", FRAGILE)
    started = time.monotonic()
    done = project.run("model=mlp", *USE_FRAGILE, f"+model.fault={fault}", "trainer.max_steps=500", "trainer.log_every_steps=1")
    assert time.monotonic() - started < 60  # not the minutes of a collective's time-out
    assert done.returncode == 1, done.output
    assert screens(done.output) == 1, done.output
    assert said in done.output
    run = project.the_run()
    failure = json.loads((run / "failure.json").read_text())
    assert failure["error"] == error
    if fault != "poison":  # which is every rank's, after the sum
        assert failure["rank"] == 1
        assert f"rank 1 on {failure['host']} (pid {failure['pid']})" in done.output
        waiting = [line for line in failure["others"] if "gave no answer" not in line]  # in the second that it has, on a busy machine
        assert waiting
        for line in waiting:
            assert re.fullmatch(r"rank(s 0, 2| 0| 2) +in backward, train_step.py:\d+ in backward", line)
            assert line in done.output
    if fault == "raise":
        assert 'in forward\n    raise ValueError("the third forward of rank 1")' in done.output
        assert "after step 2" in done.output
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    assert "ChildFailedError" not in done.output
    assert (run / "logs/rank_00001.log").exists()


@pytest.mark.parametrize(
    ("fault", "said"),
    [("raise", "the third forward of rank 1"), pytest.param("SIGKILL", "the process ended without a report", marks=pytest.mark.long)],
)
def test_under_torchrun_there_is_one_screen_too(project: Project, fault: str, said: str) -> None:
    project.write("fragile.py", FRAGILE)
    torchrun = ["--standalone", "--nproc-per-node=2", "--log-dir=torchrun_logs", "--tee=3"]
    done = project.run("model=mlp", *USE_FRAGILE[:5], f"+model.fault={fault}", torchrun=torchrun)
    assert done.returncode == 1
    assert screens(done.output) == 1
    assert said in done.output
    if fault == "raise":  # torchrun's page has it as the cause, of the rank whose it is
        [file] = project.folder.glob("torchrun_logs/*/attempt_0/1/error.json")
        told = json.loads(file.read_text())["message"]
        assert told["message"] == "ValueError: the third forward of rank 1" and "Traceback" in told["extraInfo"]["py_callstack"]
        root = done.stderr.partition("Root Cause (first observed failure):")[2]
        assert "(local_rank: 1)" in root and "the third forward of rank 1" in root, done.stderr
        printed = [path.read_text() for path in sorted(project.folder.glob("torchrun_logs/*/attempt_0/*/stdout.log"))]
        assert "run      outputs" in printed[0] and not printed[1]  # the others' logs are in the run folder
    failure = json.loads((project.the_run() / "failure.json").read_text())
    assert failure["rank"] == 1
    assert "in backward, train_step.py" in failure["others"][0]


def corrupt_idx(folder: Path) -> list[str]:
    write_mnist(folder, compress=False)
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    return ["data=mnist", f"data.root={folder}"]


def truncated_cifar(folder: Path) -> list[str]:
    write_cifar_binary(folder)
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return ["data=cifar10", f"data.root={folder}"]


def empty_text(folder: Path) -> list[str]:
    folder.mkdir()
    (folder / "empty.txt").touch()
    return ["data=char_text", "model=gpt", "objective=language_modeling", f"data.path={folder}/empty.txt"]


def missing_file(folder: Path) -> list[str]:
    return ["data=char_text", "model=gpt", "objective=language_modeling", f"data.path={folder}/nowhere.txt"]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        pytest.param(corrupt_idx, "train-images-idx3-ubyte", marks=pytest.mark.long),
        pytest.param(truncated_cifar, "data_batch_3.bin", marks=pytest.mark.long),
        pytest.param(empty_text, "empty.txt", marks=pytest.mark.long),
        (missing_file, "nowhere.txt"),
        pytest.param(lambda folder: ["model=gpt"], "image_shape=[3,16,16], num_classes=10", marks=pytest.mark.long),  # not text
    ],
)
@pytest.mark.long
def test_bad_data_is_named_without_a_traceback(project: Project, make: object, named: str) -> None:
    assert callable(make)
    done = project.run(*make(project.folder / "bad"), "cluster=cpu", "cluster.max_restarts=2")
    assert done.returncode == 2, done.output
    assert "restart" not in done.output
    assert screens(done.output) == 1, done.output
    assert named in done.output
    assert "fix:" in done.output
    assert "Traceback" not in done.output
    run = project.the_run()
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    if named == "nowhere.txt":
        again = project.run("resume", str(run))
        assert again.returncode == 2
        assert screens(again.output) == 1, again.output
    assert not (run / "metrics.jsonl").exists() or metrics(run) == []


KILLED = {"launcher": -9, "agent": 1, "rank 0": 1}
"""Who is killed with -9 -> the exit code of the launcher."""


@pytest.mark.parametrize("name", ["launcher", *(pytest.param(name, marks=pytest.mark.long) for name in ("agent", "rank 0"))])
def test_whoever_is_killed_nothing_is_left(project: Project, name: str) -> None:
    """The fixture sees to the same after a normal end, an exception and a stop, in all other tests."""
    process = project.start(*TINY, "trainer.max_steps=100000", "trainer.max_epochs=null", "cluster=cpu", "loader.num_workers=1")
    wait_for(lambda: any(len(metrics(run)) > 3 for run in project.runs() if (run / "metrics.jsonl").exists()))
    (agent,) = children(process.pid)
    os.kill({"launcher": process.pid, "agent": agent, "rank 0": pid_of(0, agent)}[name], signal.SIGKILL)
    done = finish(process, timeout=20)
    assert done.returncode in (KILLED[name], -KILLED[name] if KILLED[name] < 0 else 137), done.output
    wait_for(lambda: not our_processes(project.folder), timeout_s=3)
    assert screens(done.output) == (name != "launcher"), done.output


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def pid_of(rank: int, agent: int) -> int:
    """Return the pid of a rank: by its environment, or by its log, of one that was forked."""
    return next(pid for pid in children(agent) if is_rank(rank, Path(f"/proc/{pid}")))


def is_rank(rank: int, process: Path) -> bool:
    log = os.readlink(process / "fd" / "2")
    return f"RANK={rank}" in (process / "environ").read_text().split("\0") or log.endswith(f"/rank_{rank:05d}.log")
