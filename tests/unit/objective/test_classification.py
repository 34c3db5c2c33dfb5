"""Classification: metrics that are right, and a loss that may be smoothed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddp_train.objective.classification import Classification
from tests.unit.objective.batches import IDENTITY, image_batch, reported


def test_accuracy_and_top5_count_what_they_say() -> None:
    logits_BK = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3]] * 4)
    metrics = reported(Classification(), IDENTITY, (logits_BK, torch.tensor([0, 4, 5, 0])))  # first, fifth, sixth, first
    assert list(metrics) == list(Classification().goals)
    assert metrics["accuracy"] == 0.5
    assert metrics["accuracy_top5"] == 0.75


def test_top5_is_absent_where_it_would_always_be_right() -> None:
    assert list(reported(Classification(), IDENTITY, image_batch(num_classes=5))) == ["accuracy", "loss"]


def test_label_smoothing_changes_the_loss_and_not_the_metrics() -> None:
    batch = image_batch()
    plain, smooth = Classification(), Classification(label_smoothing=0.2)
    assert plain.loss(IDENTITY, batch).item() == pytest.approx(F.cross_entropy(*batch).item())
    assert smooth.loss(IDENTITY, batch).item() == pytest.approx(F.cross_entropy(*batch, label_smoothing=0.2).item())
    assert reported(plain, IDENTITY, batch) == reported(smooth, IDENTITY, batch)
