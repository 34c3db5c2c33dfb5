"""What is refused because it is a mean where a sum is meant; losses are in test_sanity_check.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch
from ddp_train.objective.classification import Classification
from ddp_train.training.check.sanity_check import check
from tests.unit.parts import components


class Averaging(Classification):
    """Its scores are means."""

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        sums = super().score(model, batch)
        return sums | {"loss": sums["loss"] / sums["samples"]}


class PerClass(Classification):
    """Its scores are a row for each class: their accuracies."""

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        right = nn.functional.one_hot(batch[1], 10).float() * (model(batch[0]) > -9)
        return super().score(model, batch) | {"per_class": right.mean(0)}


class OfEvery(Classification):
    """Its score compares all samples of a batch with each other, or draws: neither a sum nor a mean."""

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = model(batch[0])
        return super().score(model, batch) | {"pairs": (logits @ logits.T).square().sum(), "drawn": torch.rand(())}


def refusal(objective: Any, *words: str) -> str:
    parts = components(*words)
    parts.objective = objective
    with pytest.raises(ConfigError) as caught:
        check(parts, [next(parts.train_loader.micro_batches(0))], alone(), samples=0, predicts=False)
    return str(caught.value)


@pytest.mark.parametrize("words", [[], ["evaluation.batch_size=1"]])
def test_a_score_that_is_a_mean_is_refused(words: list[str]) -> None:
    said = refusal(Averaging(), *words)
    assert "objective: Averaging.score gives 'loss' as a mean" in said
    assert "fix: the sum of 'loss' over the samples, and their number under another name" in said
    assert "PerClass.score gives 'per_class' as a mean" in refusal(PerClass())


def test_scores_that_are_neither_are_added_up() -> None:
    parts = components()
    parts.objective = OfEvery()
    check(parts, [next(parts.train_loader.micro_batches(0))], alone(), samples=0, predicts=False)
