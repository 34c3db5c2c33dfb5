"""Classification: counts that are integers, and metrics that are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddp_train.objective.classification import Classification
from tests.unit.objective.batches import IDENTITY, image_batch


def test_correct_and_top5_count_what_they_say() -> None:
    logits_BK = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3]] * 4)
    totals = Classification().score(IDENTITY, (logits_BK, torch.tensor([0, 4, 5, 0])))  # first, fifth, sixth, first
    assert {name: totals[name].item() for name in ("samples", "correct", "correct_top5")} == {"samples": 4, "correct": 2, "correct_top5": 3}
    metrics = Classification().metrics({name: value.item() for name, value in totals.items()})
    assert list(metrics) == list(Classification().goals)
    assert metrics["accuracy"] == 0.5
    assert metrics["accuracy_top5"] == 0.75


def test_top5_is_absent_where_it_would_always_be_right() -> None:
    totals = Classification().score(IDENTITY, image_batch(num_classes=5))
    assert "correct_top5" not in totals
    assert list(Classification().metrics({name: value.item() for name, value in totals.items()})) == ["accuracy", "loss"]


def test_label_smoothing_changes_the_loss_and_not_the_metrics() -> None:
    batch = image_batch()
    plain, smooth = Classification(), Classification(label_smoothing=0.2)
    assert plain.loss(IDENTITY, batch).item() == pytest.approx(F.cross_entropy(*batch, reduction="sum").item())
    assert smooth.loss(IDENTITY, batch).item() == pytest.approx(F.cross_entropy(*batch, reduction="sum", label_smoothing=0.2).item())
    assert plain.score(IDENTITY, batch)["loss"] == smooth.score(IDENTITY, batch)["loss"]
