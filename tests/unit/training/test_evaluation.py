"""Evaluation: every sample once, and nothing left changed."""

from __future__ import annotations

import pytest

from ddp_train.distributed.world import alone
from ddp_train.training.evaluation import evaluate
from tests.unit.parts import components


def test_evaluation_leaves_the_model_in_training_mode_and_counts_every_sample() -> None:
    parts = components()
    parts.model.train()
    metrics = evaluate(parts, alone())
    assert parts.model.training
    assert metrics is not None
    assert metrics["accuracy"] * 101 == pytest.approx(round(metrics["accuracy"] * 101))
