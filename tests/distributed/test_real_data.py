"""The published experiments on the real data sets; minutes each. Set DDP_TRAIN_DATA to the folder that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.data]


def best(project: Project, metric: str) -> float:
    return float(json.loads((project.the_run() / "result.json").read_text())["metrics"]["best"][metric]["value"])


def test_mnist_reaches_99_percent(project: Project, data_folder: Callable[[str], Path]) -> None:
    done = project.run("experiment=mnist_convnet", f"data.root={data_folder('mnist')}", "cluster=cpu", timeout=900)
    assert done.returncode == 0, done.output
    assert best(project, "eval/accuracy") >= 0.99


def test_shakespeare_reaches_a_validation_loss_of_1_90(project: Project, data_folder: Callable[[str], Path]) -> None:
    path = data_folder("text/tinyshakespeare.txt")
    done = project.run("experiment=shakespeare_gpt_cpu", f"data.path={path}", "cluster=cpu", timeout=900)
    assert done.returncode == 0, done.output
    assert best(project, "eval/loss") <= 1.90


PART = """
from ddp_train.data.mnist import MNIST

class Part(MNIST):
    def __len__(self):
        return 9973  # a prime: nothing divides it
"""


def assert_equal_curves(project: Project, command: list[str]) -> None:
    """Run on 1, 2, 3 and 4 processes and compare every record."""
    for world_size in (1, 2, 3, 4):
        where = ["cluster=cpu", f"cluster.processes_per_node={world_size}", f"hydra.run.dir=outputs/{world_size}"]
        done = project.run(*command, *where, "trainer.global_batch_size=96", "trainer.max_epochs=null", "~metrics.tensorboard", timeout=900)
        assert done.returncode == 0, done.output
    alone, *others = (metrics(project.folder / f"outputs/{world_size}") for world_size in (1, 2, 3, 4))
    for other in others:
        assert [record["loss"] for record in other] == pytest.approx([record["loss"] for record in alone], rel=1e-5)
        for name in ("split", "step", "samples", "accuracy", "accuracy_top5"):  # counts: to the bit
            assert [record.get(name) for record in other] == [record.get(name) for record in alone]


def test_mnist_has_the_same_curve_on_1_to_4_processes(project: Project, data_folder: Callable[[str], Path]) -> None:
    project.write("part.py", PART)
    project.write(
        "conf/data/part.yaml", "defaults: [mnist, _self_]\n_target_: part.Part\neval: {_target_: ddp_train.data.mnist.MNIST, split: test}\n"
    )
    command = ["--config-dir=conf", "data=part", f"data.root={data_folder('mnist')}", "model=mlp", "trainer.max_steps=150"]
    command += ["optimizer=sgd", "optimizer.lr=0.05"]  # Adam divides by the gradient's size: where that is rounding alone, it grows
    assert_equal_curves(project, [*command, "trainer.log_every_steps=10", "evaluation.every_steps=50"])


def test_shakespeare_has_the_same_curve_on_1_to_4_processes(project: Project, data_folder: Callable[[str], Path]) -> None:
    path = data_folder("text/tinyshakespeare.txt")
    command = [
        "data=char_text",
        f"data.path={path}",
        "data.context_length=32",
        "data.eval.stride=32",
        "model=gpt",
        "objective=language_modeling",
    ]
    command += ["model.width=32", "model.num_layers=2", "model.num_heads=2", "model.dropout=0.0", "trainer.max_steps=60"]
    assert_equal_curves(project, [*command, "trainer.log_every_steps=5", "evaluation.every_steps=30"])
