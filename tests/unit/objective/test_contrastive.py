"""Contrastive learning: views of one sample are found among those of others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ddp_train.objective.contrastive import Contrastive, recall_at_1
from tests.unit.objective.batches import IDENTITY


class Two(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left, right[:, :4]


def test_views_that_are_alike_cost_nothing_and_views_that_are_all_the_same_the_logarithm_of_their_number() -> None:
    apart, same = 100 * torch.eye(4), torch.ones(4, 4)
    assert Contrastive(temperature=0.01).loss(IDENTITY, (apart, apart)).item() == pytest.approx(0.0, abs=1e-6)
    assert Contrastive().loss(IDENTITY, (same, same)).item() == pytest.approx(math.log(4))
    assert Contrastive(towers=2, temperature=0.01).loss(Two(), (apart, torch.eye(4, 7))).item() == pytest.approx(0.0, abs=1e-6)


def test_embeddings_are_rows_and_what_metrics_compare() -> None:
    found = Contrastive().evaluate(IDENTITY, (torch.eye(4), torch.ones(4, 4)))
    assert not found.values and found.compared is not None
    assert torch.equal(found.rows["embedding"], torch.eye(4)) and torch.equal(found.rows["other_embedding"], torch.full((4, 4), 0.5))
    assert recall_at_1(*found.compared) == 0.25


def test_recall_is_over_all_samples() -> None:
    views = torch.eye(5)
    assert recall_at_1(views, views) == 1.0
    assert recall_at_1(views, views[[1, 0, 2, 3, 4]]) == 0.6


def test_one_embedding_or_view_where_two_are_expected_is_an_error() -> None:
    for size in (2, 4):
        with pytest.raises(RuntimeError, match="supported on matrices"):
            Contrastive(towers=2).loss(nn.Bilinear(4, 4, 4), (torch.eye(4)[:size], torch.eye(4)[:size]))
    with pytest.raises(ValueError, match="too many values"):
        Contrastive().loss(IDENTITY, torch.eye(4))
