"""`ddp-train doctor` with real ranks on this machine; over several machines: tests/cluster/test_doctor.py."""

from __future__ import annotations

import json
import time

import pytest

from tests.conftest import TINY, Project

pytestmark = pytest.mark.distributed

DOCTOR = ["doctor", *TINY, "cluster=cpu"]

MINE = """
from ddp_train.data.synthetic_images import SyntheticImages

class Data(SyntheticImages):
    def __init__(self, root, **others):
        super().__init__(**others)
"""


def test_a_fit_machine_passes_and_nothing_is_left(project: Project) -> None:
    for _ in range(4):  # other tests run on these cores, and a rank that they slow down is named, as it should be
        started = time.monotonic()
        done = project.run(*DOCTOR, "--full")
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.output
    assert "fit: nothing is wrong" in done.stdout
    for said in ("1 machine, 2 ranks", "all-reduce", "exact", "TFLOP/s", "GB/s"):
        assert said in done.stdout
    assert time.monotonic() - started < 60  # with full measurements, on a busy machine
    assert [path for path in project.folder.rglob("*") if not path.is_dir()] == []


def test_what_is_wrong_is_named_with_advice_and_ends_with_78(project: Project) -> None:
    project.write("mine.py", MINE)
    done = project.run(*DOCTOR, "--json", "+data.root=missing", "data._target_=mine.Data", env={"GLOO_SOCKET_IFNAME": "eth99"})
    assert done.returncode == 78, done.output
    assert "GLOO_SOCKET_IFNAME=eth99 names eth99, which does not exist" in done.stderr
    assert "data.root: this path does not exist" in done.stderr
    assert done.stderr.count("  fix: ") == 2
    assert "Traceback" not in done.output and "not tried" in done.stderr
    report = json.loads(done.stdout)
    assert (report["exit_code"], report["count"], len(report["problems"])) == (78, 1, 2)
    assert report["machines"]["0"]["facts"]["processes"] == 2


@pytest.mark.long
def test_under_ones_own_torchrun_it_is_the_same(project: Project) -> None:
    done = project.run(*DOCTOR, torchrun=["--nproc-per-node=2"])
    assert done.returncode == 0, done.output
    assert "1 machine, 2 ranks" in done.stdout
    assert project.runs() == []


def test_a_wrong_config_and_a_folder_that_holds_a_run_are_refused(project: Project) -> None:
    done = project.run(*DOCTOR, "trainer.max_stepz=3")
    assert done.returncode == 2 and "max_steps" in done.output, done.output
    project.write("here/config.yaml", "a: 1")
    done = project.run(*DOCTOR, "hydra.run.dir=here")
    assert done.returncode == 2, done.output
    assert "not an empty folder" in done.output
    assert (project.folder / "here/config.yaml").exists()
