"""The same experiment on any number of processes; stopped and resumed as if it never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import FEW, TINY, TINY_CONVNET, Project, finish, metrics, wait_for

pytestmark = pytest.mark.distributed


def losses(run: Path, split: str = "train") -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in metrics(run, split)]


WARM = """
import torch
import torch.nn.functional as F
from torch import nn
from ddp_train.objective.classification import Classification

class Warm(nn.Module, Classification):
    goals = {**Classification.goals, "temperature": "min"}
    def __init__(self):
        super().__init__()
        Classification.__init__(self)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("steps", torch.zeros(()))
    def loss(self, model, batch):
        images, labels = batch
        self.steps += self.training
        return F.cross_entropy(model(images) / self.log_temperature.exp(), labels)
    def metrics(self, means):
        return super().metrics(means) | {"temperature": self.log_temperature.exp().item()}
"""


def test_the_same_global_batch_gives_the_same_run_on_one_two_and_four_processes(project: Project) -> None:
    """Also with an objective that learns: its gradient is the mean over the global batch as the model's is."""
    project.write("warm.py", WARM)
    for world_size, accumulation in ((1, 4), (2, 2), (4, 1)):
        done = project.run(
            *TINY_CONVNET,
            "trainer.max_steps=25",  # 640 samples are 20 steps: into the second epoch
            "loader.micro_batch_size=8",
            f"trainer.grad_accum_steps={accumulation}",
            "trainer.clip_grad_norm=1.0",
            "evaluation.every_steps=10",
            "health.check_replicas_every_steps=10",
            "objective._target_=warm.Warm",
            "~objective.label_smoothing",
            "cluster=cpu",
            f"cluster.processes_per_node={world_size}",
            f"hydra.run.dir=outputs/{world_size}",
        )
        assert done.returncode == 0, done.output
        assert f"global batch 32 = micro-batch 8 x {world_size} rank" in done.stdout
    alone, *others = (project.folder / "outputs" / str(world_size) for world_size in (1, 2, 4))
    for other in others:
        for mine, theirs in zip(metrics(alone), metrics(other), strict=True):
            assert (mine["split"], mine["step"], mine["samples"], mine["epoch"]) == tuple(
                theirs[name] for name in ("split", "step", "samples", "epoch")
            )
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs.get("grad_norm", 0.0) == pytest.approx(mine.get("grad_norm", 0.0), rel=1e-4)
            assert theirs.get("accuracy") == mine.get("accuracy")  # counts: equal to the bit
            assert theirs.get("temperature", 0.0) == pytest.approx(mine.get("temperature", 0.0), rel=1e-5)
    assert abs(metrics(alone, "eval")[-1]["temperature"] - 1) > 1e-3


NORMED = """
from torch import nn

class Normed(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        width = image_shape[0] * image_shape[1] * image_shape[2]
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(width, num_classes))
"""


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.long)])
def test_killed_and_resumed_is_bitwise_the_run_that_never_stopped(project: Project, ranks: int) -> None:
    """Three ranks, because two cannot show a difference in the order of a sum; dropout, workers and batch norm, because they have state."""
    command = [*FEW, "loader.num_workers=1", "cluster=cpu"]
    if ranks == 3:
        project.write("parts.py", NORMED)
        command += ["model._target_=parts.Normed", "~model.width", "~model.dropout"]
    else:
        command += ["model=mini_resnet", "model.width=4"]
    command += [
        f"cluster.processes_per_node={ranks}",
        "trainer.max_steps=60",
        "trainer.max_epochs=null",
        "checkpoint.every_steps=7",
        "evaluation.every_steps=10",
    ]
    command += ["trainer.log_every_steps=5"]  # so that checkpoints lie between two records
    whole = project.run(*command, "hydra.run.dir=outputs/whole")
    assert whole.returncode == 0, whole.output

    stopped = project.folder / "outputs" / "stopped"
    process = project.start(*command, "hydra.run.dir=outputs/stopped")
    wait_for(lambda: len(list((stopped / "checkpoints").glob("step_*/COMPLETE"))) >= 2)
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert not (stopped / "result.json").exists()

    resumed = project.run(*command, "hydra.run.dir=outputs/stopped")  # resume=auto: the same command again
    assert resumed.returncode == 0, resumed.output
    assert "resumed  after step" in resumed.stdout
    assert losses(stopped) == losses(project.folder / "outputs" / "whole")
    assert losses(stopped, "eval") == losses(project.folder / "outputs" / "whole", "eval")
    assert json.loads((stopped / "result.json").read_text())["status"] == "completed"
    assert not list(stopped.glob("checkpoints/.partial*"))

    hydras = (stopped / ".hydra/hydra.yaml").stat().st_mtime_ns
    (stopped / "result.json").unlink()  # as if killed after the last step: what is missing is made up for
    again = project.run("resume", "outputs/stopped", torchrun=["--standalone", f"--nproc-per-node={ranks}"])
    assert again.returncode == 0, again.output
    assert (stopped / ".hydra/hydra.yaml").stat().st_mtime_ns == hydras
    assert json.loads((stopped / "result.json").read_text())["step"] == 60


@pytest.mark.long
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(project: Project) -> None:
    command = [*TINY, "cluster=cpu", "checkpoint.every_steps=2", "hydra.run.dir=outputs/run"]
    assert project.run(*command, "trainer.max_steps=6").returncode == 0
    run = project.the_run()
    damaged = run / "checkpoints/step_00000006/rank_00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = project.run("resume", "outputs/run", "trainer.max_steps=8")
    assert done.returncode == 0, done.output
    assert "checkpoint step_00000006 is not used: rank_00000.safetensors is damaged" in done.stdout
    assert "resumed  after step 4" in done.stdout
    assert [step for step, _ in losses(run)] == list(range(1, 9))
