"""Optimizers and schedulers of others, and rates by layer: one command each, no code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY, Project, metrics
from tests.thirdparty.conftest import needs

Train = Callable[..., Path]


def rates(run: Path) -> list[float]:
    return [record["lr"] for record in metrics(run, "train")]


@needs("schedulefree")
def test_schedule_free_adamw(train: Train, project: Project) -> None:
    own = ["optimizer._target_=schedulefree.AdamWScheduleFree", "scheduler=constant", "evaluation.every_steps=4"]
    whole = train(*TINY, *own, "trainer.max_steps=8")
    resumed = train(*TINY, *own, "trainer.max_steps=6")
    done = project.run("resume", str(resumed), "trainer.max_steps=8", timeout=600)
    assert done.returncode == 0, done.output
    for split in ("train", "eval"):
        assert metrics(resumed, split)[-1]["loss"] == metrics(whole, split)[-1]["loss"]


def test_sequential_lr(train: Train) -> None:
    torch = "torch.optim.lr_scheduler"
    warm = f"{{_target_: {torch}.LinearLR, start_factor: 0.5, total_iters: 2}}"
    fall = f"{{_target_: {torch}.CosineAnnealingLR, T_max: 4}}"
    own = ["scheduler=custom", f"scheduler._target_={torch}.SequentialLR"]
    run = train(
        *TINY, *own, f"+scheduler.schedulers=[{warm},{fall}]", "+scheduler.milestones=[2]", "trainer.max_steps=6", "optimizer.lr=0.1"
    )
    assert rates(run) == pytest.approx([0.075, 0.1, 0.0853553, 0.05, 0.0146447, 0.0], abs=1e-6)


def test_reduce_lr_on_plateau(train: Train) -> None:
    own = ["scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=100.0", "evaluation.every_steps=1"]
    run = train(*TINY, *own, "trainer.max_steps=4", "optimizer.lr=0.1")
    assert rates(run) == pytest.approx([0.1, 0.1, 0.01, 0.001])  # a record tells the rate before its step's evaluation


def test_layer_wise_rates(train: Train) -> None:
    run = train(*TINY, "model.depth=3", "optimizer.layer_decay=0.5", "optimizer.lr=0.1", "trainer.max_steps=2")
    assert "group    rest: " in (run / "logs" / "rank_00000.log").read_text()
