"""A compiled run on two ranks: killed and resumed it is the run that never stopped, and its files are those of any other run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddp_train.checkpoint.read import read_shared
from tests.conftest import TINY_CONVNET, Project, metrics
from tests.unit.parts import components

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

COMMAND = [
    *(*TINY_CONVNET, "compile=default", "cluster=cpu", "cluster.processes_per_node=2", "cluster.start_timeout_s=900"),
    *("trainer.max_steps=10", "trainer.max_epochs=null", "trainer.global_batch_size=32", "checkpoint.every_steps=3"),
    *("evaluation.every_steps=5", "optimizer.lr=0.01", "callbacks=ema"),
]


def values(run: Path) -> list[tuple[Any, ...]]:
    """Return what a run has recorded, but for its times."""
    return [tuple(record.get(name) for name in ("split", "step", "samples", "loss", "grad_norm", "accuracy")) for record in metrics(run)]


def test_killed_and_resumed_is_bitwise_the_run_that_never_stopped_and_no_name_shows_that_it_is_compiled(project: Project) -> None:
    whole = project.run(*COMMAND, "hydra.run.dir=outputs/whole", timeout=1200)
    assert whole.returncode == 0, whole.output

    folder = project.folder / "outputs" / "parts"
    killed = project.run(*COMMAND, "hydra.run.dir=outputs/parts", "debug.faults=[{kind: kill, rank: 1, step: 7}]", timeout=1200)
    assert killed.returncode not in (0, 75), killed.output
    compiled = set(folder.glob("compiled/**/*.cpp"))
    assert compiled  # and kept with the run
    resumed = project.run("resume", str(folder), "debug.faults=[]", timeout=1200)
    assert resumed.returncode == 0, resumed.output
    assert re.search("resumed  after step [356]", resumed.stdout), resumed.output  # 5: an evaluation; 6 may not be saved yet
    assert values(folder) == values(project.folder / "outputs/whole")

    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    assert list(read_shared(newest)["model"]) == list(components(base=TINY_CONVNET).model.state_dict())
    assert set(folder.glob("compiled/**/*.cpp")) == compiled  # what was compiled before the kill is taken from there
    eager = project.run(*COMMAND, "compile=off", "hydra.run.dir=outputs/eager", timeout=1200)
    assert eager.returncode == 0, eager.output
    losses = [[record["loss"] for record in metrics(project.folder / f"outputs/{name}", "train")] for name in ("whole", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert metrics(folder, "train")[-1]["compile/graphs"] >= 1
    files = [path for path in (project.folder / "outputs").rglob("*") if path.is_file() and "compiled" not in path.parts]
    assert not [path for path in files if b"_orig_mod." in path.read_bytes()]
