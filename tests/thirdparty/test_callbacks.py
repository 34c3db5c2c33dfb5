"""Callbacks in one command or one YAML each; the lines of own code are counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import TINY, Project, metrics

SHORT = [*TINY, "trainer.max_steps=12", "evaluation.every_steps=3", "cluster=cpu"]


def test_early_stopping(train: Callable[..., Path]) -> None:
    run = train(*SHORT, "callbacks=early_stopping", "callbacks.early_stopping.patience=2", "callbacks.early_stopping.min_delta=1")
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["step"]) == ("completed", 9)
    assert result["early_end"].startswith("callbacks.early_stopping: eval/accuracy has not improved on")


def test_ema(train: Callable[..., Path]) -> None:
    raw, averaged = (train(*SHORT, *more) for more in ([], ["callbacks=ema"]))
    assert [record["loss"] for record in metrics(raw, "train")] == [record["loss"] for record in metrics(averaged, "train")]
    assert [record["loss"] for record in metrics(raw, "eval")] != [record["loss"] for record in metrics(averaged, "eval")]


def test_freeze_then_unfreeze(train: Callable[..., Path]) -> None:
    chosen = ["callbacks=freeze", "callbacks.freeze.patterns=[hidden]", "callbacks.freeze.until_step=6"]
    free, frozen = (train(*SHORT, *more) for more in ([], chosen))
    losses = [[record["loss"] for record in metrics(run, "train")] for run in (free, frozen)]
    assert losses[0][0] == losses[1][0] and losses[0][3:] != losses[1][3:]


IMAGES = """
class Filters:
    def on_evaluation(self, run, metrics):
        weight = run.model.hidden[0].weight.detach()
        picture = weight.sub(weight.min()).div(weight.max() - weight.min())
        run.log_image("filters", picture[None])
        run.log_text("step", f"after step {run.step}")
"""


def test_images_to_tensorboard(train: Callable[..., Path], project: Project) -> None:
    project.write("filters.py", IMAGES)
    assert len(IMAGES.strip().splitlines()) <= 6
    few = [text for text in SHORT if text != "~metrics.tensorboard"]
    run = train(*few, "+callbacks.filters._target_=filters.Filters")
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    found = events.Images("filters")
    assert [each.step for each in found] == [3, 6, 9, 12]
    assert found[0].encoded_image_string.startswith(b"\x89PNG") and found[0].height == 16
