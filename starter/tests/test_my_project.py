"""The parts by themselves, and all of them in a run of a few steps. `ddp_train_run` is a fixture that comes with ddp_train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from my_project.data import Waves
from my_project.metric import worst_class_accuracy
from my_project.model import WaveNet

from ddp_train import RunResult


def test_the_model_takes_what_the_data_gives() -> None:
    wave, label = Waves(9)[4]
    assert WaveNet(3)(wave[None]).shape == (1, 3) and label == 1


def test_the_worst_class_counts() -> None:
    predictions = torch.eye(2)[[0, 0, 1, 0]]
    assert worst_class_accuracy(predictions, torch.tensor([0, 0, 1, 1])) == 0.5


@pytest.mark.parametrize("words", [[], ["experiment=wide"]], ids=["default", "wide"])
def test_a_few_steps_of_everything(ddp_train_run: Callable[..., RunResult], words: list[str]) -> None:
    result = ddp_train_run(*words, "debug=fast")  # trains, evaluates and saves
    assert result.status == "completed"
    assert {"train/weight_norm", "eval/worst_class", "eval/accuracy"} <= set(result.metrics)
