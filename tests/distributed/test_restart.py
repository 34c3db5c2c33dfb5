"""A group that torchrun starts again after a failure continues the same run, as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TINY, Finished, Project, metrics

pytestmark = pytest.mark.distributed

FRAGILE = """
import os, signal
from pathlib import Path
from ddp_train.model.mlp import MLP

class Fragile(MLP):
    '''An MLP whose rank 1 dies: at the given training forwards, each once; or as it is built, once; or always.'''
    def __init__(self, deaths, expected, **arguments):
        super().__init__(**arguments)
        assert os.environ.get("FRAGILE_SETTING", "") == expected
        self.deaths, self.calls = list(deaths), 0
        if "built" in self.deaths:
            self.die("built")
        if "always" in self.deaths and os.environ["RANK"] == "1":
            raise ValueError("rank 1 is not to be")
    def forward(self, images):
        self.calls += self.training
        if self.training and self.calls in self.deaths:
            self.die(self.calls)
        return super().forward(images)
    def die(self, place):
        mark = Path(f"died_{place}")
        if os.environ["RANK"] != "1" or mark.exists():
            return
        mark.touch()
        for path in Path(".").glob("conf/*/*.yaml"):  # somebody edits the configuration meanwhile
            path.write_text(path.read_text().replace("0.01", "0.5"))
        os.kill(os.getpid(), signal.SIGKILL)
"""
RUN = ["--config-dir=conf", *TINY, "+edited=lr", "model._target_=fragile.Fragile", "+model.expected=one"]
RUN += ["+cluster.env.FRAGILE_SETTING=one", "trainer.max_steps=12", "checkpoint.every_steps=2"]
RUN += ["checkpoint.asynchronous=false"]  # a rank dies a step after a save: whether that one counts must not depend on the disk
THREE = ["cluster=cpu", "cluster.processes_per_node=3"]


def prepare(folder: Path) -> None:
    (folder / "fragile.py").write_text(FRAGILE)
    (folder / "conf/edited").mkdir(parents=True)
    (folder / "conf/edited/lr.yaml").write_text("# @package _global_\noptimizer: {lr: 0.01}\n")


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return all that a run has computed, without what depends on the clock."""
    kept = ("split", "step", "samples", "epoch", "loss", "lr", "grad_norm", "accuracy", "accuracy_top5")
    return [{name: record[name] for name in kept if name in record} for record in metrics(run)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, strategy: str) -> Path:
    """Return the folder of a run that nothing happened to."""
    project = Project(tmp_path_factory.mktemp("undisturbed"))
    prepare(project.folder)
    done = project.run(*RUN, *THREE, "+model.deaths=[]", f"strategy={strategy}")
    assert done.returncode == 0, done.output
    return project.the_run()


def check_restarts(done: Finished, project: Project, undisturbed: Path, *, said: str) -> Path:
    assert done.returncode == 0, done.output
    for number, step in ((1, 2), (2, 6)):
        assert f"{said}; restart {number} of 3 from step {step}" in done.output, done.output
    assert "The run failed" not in done.output
    run = project.the_run()
    assert numbers(run) == numbers(undisturbed)
    first, second = (json.loads((folder / "result.json").read_text())["metrics"] for folder in (run, undisturbed))
    exact = {name: value for name, value in first["last"].items() if not name.endswith(("_s", "_ms", "_per_device", "_gib"))}
    assert exact.items() <= second["last"].items()
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 0.01
    assert not (run / "failure.json").exists()
    return run


@pytest.mark.parametrize("strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "zero1"))], indirect=True)
def test_a_killed_rank_costs_only_the_steps_since_the_last_checkpoint(project: Project, undisturbed: Path, strategy: str) -> None:
    prepare(project.folder)
    deaths = "[4,5]" if strategy == "fsdp" else "[4,7]"  # DDP takes two forwards more before a checkpoint is loaded
    done = project.run(*RUN, *THREE, f"+model.deaths={deaths}", "cluster.max_restarts=3", f"strategy={strategy}")
    run = check_restarts(done, project, undisturbed, said="rank 1 failed (SIGKILL)")
    assert [json.loads((run / f"failure.{number}.json").read_text())["rank"] for number in (1, 2)] == [1, 1]


@pytest.mark.long
def test_under_a_users_own_torchrun_rank_0_continues_instead_of_composing_again(project: Project, undisturbed: Path) -> None:
    prepare(project.folder)
    done = project.run(*RUN, "+model.deaths=[4,7]", torchrun=["--standalone", "--nproc-per-node=3", "--max-restarts=3"])
    check_restarts(
        done,
        project,
        undisturbed,
        said="rank 1 failed (ProcessLost: the process ended without a report; torchrun's own page has its signal or exit code)",
    )
    assert "optimizer: {lr: 0.5}" in (project.folder / "conf/edited/lr.yaml").read_text()


@pytest.mark.long
def test_the_last_failure_alone_has_a_screen_and_without_progress_there_is_a_last_one(project: Project) -> None:
    prepare(project.folder)
    done = project.run(*RUN, *THREE, "+model.deaths=[always]", "cluster.max_restarts=1")
    assert done.returncode == 1
    assert done.output.count("The run failed: rank 1") == done.output.count("The run failed") == 1, done.output
    assert "rank 1 failed (ValueError: rank 1 is not to be); restart 1 of 1 from the start" in done.output
    run = project.the_run()
    assert {path.name for path in run.glob("failure*")} == {"failure.json", "failure.1.json"}
    done = project.run("resume", str(run), "cluster.max_restarts=9")  # the failures count on
    assert done.returncode == 93, done.output
    assert "restart 1 of 9 from the start" in done.output and "restart 2 of 9" not in done.output
    assert "No progress: the run was started again 3 times from the start without a new checkpoint" in done.output
    assert done.output.count("ValueError: rank 1 is not to be") == 1 + 4
    assert json.loads((run / "result.json").read_text())["status"] == "failed"


@pytest.mark.long
def test_a_restart_begins_with_the_checkpoint_that_was_asked_for(project: Project, undisturbed: Path) -> None:
    prepare(project.folder)
    shutil.copytree(undisturbed, project.folder / "outputs/run")
    run = project.folder / "outputs/run"
    (older, newer) = sorted((run / "checkpoints").glob("step_*"))
    done = project.run("resume", str(older), "cluster.max_restarts=1", "model.deaths=[built]", "trainer.max_steps=14")
    assert done.returncode == 0, done.output
    assert f"resumed  after step {int(older.name.removeprefix('step_'))}" in done.output  # not the newer one, which is there until then
    assert list((run / "checkpoints").glob(f"aside_*_{newer.name}"))
    assert [record["step"] for record in metrics(run, "train")] == list(range(1, 15))
