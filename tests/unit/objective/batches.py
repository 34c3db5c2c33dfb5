"""Batches of twelve samples, how they can be split, and what the parts add up to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IDENTITY = nn.Identity()  # the batch's inputs are the logits
SPLITS = [[12], [6, 6], [1, 11], [5, 4, 3], [1] * 12]


def image_batch(num_classes: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, num_classes, dtype=torch.float64, requires_grad=True), torch.randint(num_classes, (12,))


def token_model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Embedding(13, 13, dtype=torch.float64), (torch.randint(13, (12, 4)), torch.randint(13, (12, 4)))


def add_up(objective: Any, model: nn.Module, batch: tuple[Tensor, Tensor], sizes: list[int]) -> tuple[float, float, dict[str, Tensor]]:
    """Return the sums of loss, weight and score over the parts of a batch."""
    loss, weight, totals = 0.0, 0, dict[str, Tensor]()
    for part in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        loss += objective.loss(model, part).item()
        weight += int(objective.weight(part))
        for name, value in objective.score(model, part).items():
            assert value.shape == ()
            totals[name] = totals[name] + value if name in totals else value
    return loss, weight, totals
