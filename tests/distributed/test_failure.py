"""What goes wrong on a rank ends the run within seconds, with one screen, exit code 1, and nothing left behind."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, Project, finish, metrics, our_processes, wait_for
from tests.unit.data_files import write_cifar_binary, write_mnist

pytestmark = pytest.mark.distributed

FRAGILE = """
import os, signal
from torch import nn

class Fragile(nn.Module):
    def __init__(self, num_classes, fault):
        super().__init__()
        self.fault, self.calls = fault, 0
        self.map = nn.Linear(3 * 16 * 16, num_classes)
    def forward(self, images):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.fault == "raise":
                raise ValueError("the third forward of rank 1")
            if self.fault == "poison":
                return self.map(images.flatten(1)) * float("nan")
            if self.fault.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, self.fault))
        return self.map(images.flatten(1))
"""
USE_FRAGILE = [
    "model._target_=fragile.Fragile",
    "~model.image_shape",
    "~model.width",
    "~model.depth",
    "cluster=cpu",
    "cluster.processes_per_node=3",
]


def screens(output: str) -> int:
    return output.count("The run failed: ")


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("raise", "ValueError", "the third forward of rank 1"),
        ("SIGKILL", "SIGKILL", "ended by SIGKILL"),
        ("SIGSEGV", "SIGSEGV", "ended by SIGSEGV"),
        ("poison", "NonFiniteLossError", "the training loss is nan"),
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
    if fault == "raise":
        assert 'in forward\n    raise ValueError("the third forward of rank 1")' in done.output
        assert "after step 2" in done.output
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    assert "ChildFailedError" not in done.output
    assert (run / "logs/rank_00001.log").exists()


def test_under_torchrun_the_failing_rank_shows_its_own_screen(project: Project) -> None:
    project.write("fragile.py", FRAGILE)
    done = project.run("model=mlp", *USE_FRAGILE[:4], "+model.fault=raise", torchrun=["--standalone", "--nproc-per-node=2"])
    assert done.returncode == 1
    assert screens(done.output) == 1
    assert "the third forward of rank 1" in done.output


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
        (corrupt_idx, "train-images-idx3-ubyte"),
        (truncated_cifar, "data_batch_3.bin"),
        (empty_text, "empty.txt"),
        (missing_file, "nowhere.txt"),
    ],
)
def test_bad_data_is_named_without_a_traceback(project: Project, make: object, named: str) -> None:
    assert callable(make)
    done = project.run(*make(project.folder / "bad"), "cluster=cpu")
    assert done.returncode == 1, done.output
    assert screens(done.output) == 1, done.output
    assert named in done.output
    assert "fix:" in done.output
    assert "Traceback" not in done.output
    run = project.the_run()
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    if named == "nowhere.txt":
        again = project.run("resume", str(run))
        assert again.returncode == 1
        assert screens(again.output) == 1, again.output
    assert not (run / "metrics.jsonl").exists() or metrics(run) == []


ENDINGS = {  # what is done to the launcher -> its exit code
    "SIGINT": 130,
    "SIGTERM": 143,
    "SIGKILL": -9,
}


@pytest.mark.parametrize("name", ENDINGS)
def test_stopping_the_launcher_stops_everything(project: Project, name: str) -> None:
    process = project.start(*TINY, "trainer.max_steps=100000", "cluster=cpu", "data.num_workers=1")
    wait_for(lambda: any(len(metrics(run)) > 3 for run in project.runs() if (run / "metrics.jsonl").exists()))
    process.send_signal(getattr(signal, name))
    assert finish(process, timeout=20).returncode == ENDINGS[name]
    wait_for(lambda: not our_processes(project.folder), timeout_s=3)
    if name == "SIGINT":
        assert json.loads((project.the_run() / "result.json").read_text())["status"] == "interrupted"
