"""Distillation: the teacher stays as it is, and its share of the loss is its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_train.objective.classification import Classification
from ddp_train.objective.distillation import Distillation
from ddp_train.training.build.model import has_state
from tests.unit.objective.batches import IDENTITY, image_batch, reported


def teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Dropout(0.9)).double()


def test_the_loss_is_the_mixture_and_the_metrics_are_the_models() -> None:
    batch, model = image_batch(), teacher()
    only_labels = Distillation(teacher=model, teacher_share=0.0)
    assert only_labels.loss(IDENTITY, batch).item() == pytest.approx(Classification().loss(IDENTITY, batch).item())
    theirs = model(batch[0])
    mixed = Distillation(teacher=model, teacher_share=1.0, temperature=3.0).loss(IDENTITY, batch)
    expected = 9 * F.kl_div((batch[0] / 3).log_softmax(1), (theirs / 3).softmax(1), reduction="batchmean")
    assert mixed.item() == pytest.approx(expected.item())
    assert mixed.requires_grad
    assert reported(only_labels, IDENTITY, batch) == reported(Classification(), IDENTITY, batch)


def test_the_teacher_evaluates_is_frozen_and_is_in_no_checkpoint() -> None:
    objective = Distillation(teacher=teacher())
    assert not any(parameter.requires_grad for parameter in objective.parameters())
    before = torch.cat([buffer.double().flatten() for buffer in objective.buffers()])
    objective.loss(IDENTITY, image_batch())
    assert torch.equal(before, torch.cat([buffer.double().flatten() for buffer in objective.buffers()]))
    assert not has_state(objective)
