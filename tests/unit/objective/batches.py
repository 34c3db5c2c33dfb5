"""Batches of twelve samples, how they can be split, and what the parts add up to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.interfaces.batch import batch_size
from ddp_train.interfaces.objective import evaluate_batch, loss_sum
from ddp_train.training.parts.metric import ValueTotals

IDENTITY = nn.Identity()  # the batch's inputs are the logits
SPLITS = [[12], [6, 6], [1, 11], [5, 4, 3], [1] * 12]


def image_batch(num_classes: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, num_classes, dtype=torch.float64, requires_grad=True), torch.randint(num_classes, (12,))


def token_model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Embedding(13, 13, dtype=torch.float64), (torch.randint(13, (12, 4)), torch.randint(13, (12, 4)))


def parts_of(batch: tuple[Tensor, Tensor], sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(batch[0].split(sizes), batch[1].split(sizes), strict=True)


def mean_loss(objective: Any, model: nn.Module, *batches: Any) -> float:
    """Return the training loss over all samples of the batches."""
    added = [loss_sum(objective, model, batch) for batch in batches]
    return sum(each.total.item() for each in added) / float(sum(each.num_units for each in added))


def reported(objective: Any, model: nn.Module, *batches: Any) -> dict[str, Any]:
    """Return the metrics over all samples of the batches."""
    totals = ValueTotals()
    for batch in batches:
        totals.add(evaluate_batch(objective, model, batch).values, size=batch_size(batch), counts=True)
    metrics: dict[str, Any] = objective.metrics(totals.means(lambda sums: sums))
    return metrics
