"""The published experiments on the real data sets; minutes each. Set DDP_TRAIN_DATA to the folder that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Project

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
