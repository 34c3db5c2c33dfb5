"""Evaluation: every sample once, and nothing left changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ddp_train.distributed.world import alone
from ddp_train.training.evaluation import evaluate
from tests.unit.parts import components, trainer


def test_evaluation_leaves_the_model_in_training_mode_and_counts_every_sample() -> None:
    parts = components()
    parts.model.train()
    metrics = evaluate(parts, alone())
    assert parts.model.training
    assert metrics is not None
    assert metrics["accuracy"] * 101 == pytest.approx(round(metrics["accuracy"] * 101))


class OneUse:
    """Mixed precision of one's own, whose contexts can be entered once, as those of `contextmanager`."""

    def __init__(self) -> None:
        self.entered = 0

    @contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        self.entered += 1
        yield

    def scaler(self, device: torch.device, world_size: int = 1) -> Any:
        return torch.amp.GradScaler(device.type, enabled=False)


def test_each_batch_has_a_context_of_its_own_in_training_and_in_evaluation() -> None:
    parts = components("evaluation.batch_size=32", "loader.micro_batch_size=16", "trainer.grad_accum_steps=2", "trainer.max_steps=3")
    parts.amp = OneUse()
    trainer(parts).train()
    assert parts.amp.entered == 3 * 2 + 4  # 101 samples are four batches
