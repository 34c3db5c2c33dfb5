"""Callbacks in real runs: stopped, killed, resumed, swept and rewound, on one, two and three ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_train.checkpoint.read import read_shared
from ddp_train.training.record import throughput
from tests.conftest import FEW, TINY, Project, metrics

pytestmark = pytest.mark.distributed

NORMED = """
from torch import nn

class Normed(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        width = image_shape[0] * image_shape[1] * image_shape[2]
        hidden = [layer for _ in range(2) for layer in (nn.Linear(width, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, width))]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(width, num_classes))
"""
TELLING = """
import torch

class Telling:
    def on_step(self, run):
        if run.step % (run.rank + 2) == 0:
            run.log(f"rank/{run.rank}", torch.tensor(run.step / 3))
            run.log("all", run.step / 7)
"""
RUN = [
    *FEW,
    *["model._target_=normed.Normed", "~model.width", "~model.dropout", "cluster=cpu", "health.check_replicas_every_steps=9"],
    *[
        "trainer.max_steps=60",
        "trainer.max_epochs=null",
        "evaluation.every_steps=10",
        "checkpoint.every_steps=7",
        "trainer.log_every_steps=5",
    ],
    *["callbacks=[early_stopping,ema,freeze]", "callbacks.early_stopping.min_delta=100", "callbacks.early_stopping.patience=4"],
    *["callbacks.ema.decay=0.9", "callbacks.freeze.patterns=['1','4.weight']", "callbacks.freeze.until_step=23"],
    "+callbacks.telling._target_=telling.Telling",
]
"""Is stopped after step 50: no evaluation is better by 100 than that of step 10."""


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return a run's records without the times."""
    timed = ("time", *throughput.NAMES)
    return [{name: value for name, value in record.items() if name not in timed} for record in metrics(run)]


def weights(run: Path, step: int) -> list[tuple[dict[str, Any], bytes]]:
    """Return the tensors of a checkpoint, optimizer, averages and random streams included."""
    found = []
    for file in sorted((run / f"checkpoints/step_{step:08d}").glob("rank_*.safetensors")):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        del header["__metadata__"]["origin"]  # which run it is of
        found.append((header, content[end:]))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stopped_killed_resumed_and_swept_is_bitwise_the_run_that_never_stopped(project: Project, ranks: int) -> None:
    project.write("normed.py", NORMED)
    project.write("telling.py", TELLING)
    command = [*RUN, f"cluster.processes_per_node={ranks}"]
    done = project.run(*command, "hydra.run.dir=outputs/whole", timeout=600)
    assert done.returncode == 0, done.output
    whole, stopped = (project.folder / "outputs" / name for name in ("whole", "stopped"))
    reason = "callbacks.early_stopping: eval/accuracy has not improved on"
    assert f"stopped by {reason}" in done.stdout
    result = json.loads((whole / "result.json").read_text())
    assert (result["status"], result["step"]) == ("completed", 50) and result["early_end"].startswith(reason)
    assert {"rank/0", "all"} <= metrics(whole, "train")[-1].keys()

    first = project.run(*command, "debug.faults=[{kind: sigterm, step: 17}]", "hydra.run.dir=outputs/stopped", timeout=600)
    assert first.returncode == 75, first.output
    second = project.run("resume", "outputs/stopped", "debug.faults=[{kind: kill, step: 33}]", timeout=600)
    assert second.returncode not in (0, 75), second.output
    third = project.run("resume", "outputs/stopped", "debug.faults=[]", timeout=600)
    assert third.returncode == 0, third.output
    assert numbers(stopped) == numbers(whole)
    assert weights(stopped, 50) == weights(whole, 50)
    assert json.loads((stopped / "result.json").read_text())["early_end"] == result["early_end"]

    again = project.run("resume", "outputs/stopped", timeout=600)
    assert again.returncode == 0 and "was stopped after step 50 by callbacks.early_stopping" in again.stdout, again.output
    onward = project.run("resume", "outputs/stopped", "callbacks.early_stopping.patience=9", timeout=600)
    assert onward.returncode == 0, onward.output
    assert json.loads((stopped / "result.json").read_text())["step"] == 60

    swept = project.run(*command, "-m", "seed=1,0", "hydra.sweep.dir=outputs/swept", timeout=600)
    assert swept.returncode == 0, swept.output
    assert numbers(project.folder / "outputs/swept/1") == numbers(whole)
    assert weights(project.folder / "outputs/swept/1", 50) == weights(whole, 50)


@pytest.mark.long
def test_a_rewind_takes_the_callbacks_back_too(project: Project) -> None:
    project.write("normed.py", NORMED)
    project.write("telling.py", TELLING)
    command = [*RUN, "cluster.processes_per_node=2", "health.on_nonfinite=rewind"]
    done = project.run(*command, "debug.faults=[{kind: nan, step: 24}]", timeout=600)
    assert done.returncode == 0, done.output
    run = project.the_run()
    assert "rewound from step 25 to step_00000021" in done.stdout
    assert done.stdout.count("are trained after step 23") == 2
    assert read_shared(run / "checkpoints/step_00000050", only=["callbacks"])["callbacks"]["ema"]["num_updates"] == 50


def test_early_stopping_completes_a_run_whose_averages_are_evaluated(project: Project) -> None:
    command = [*TINY, "cluster=cpu", "trainer.max_steps=30", "evaluation.every_steps=2", "callbacks=[early_stopping,ema]"]
    done = project.run(*command, "callbacks.early_stopping.patience=2", "callbacks.early_stopping.min_delta=100")
    assert done.returncode == 0, done.output
    assert "stopped by callbacks.early_stopping: eval/accuracy has not improved on" in done.stdout
    result = json.loads((project.the_run() / "result.json").read_text())
    assert (result["status"], result["step"]) == ("completed", 6)
    assert "~callbacks.early_stopping" in done.stdout
