"""What a model gives beside its output counts as it is told to, in training alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from tests.unit.objective.batches import IDENTITY, image_batch


class Giving(nn.Module):
    def __init__(self, aux: Any) -> None:
        super().__init__()
        self.aux = aux

    def forward(self, inputs: Tensor) -> Any:
        return inputs, self.aux


def test_a_loss_beside_the_logits_counts_for_each_sample() -> None:
    batch, model = image_batch(), Giving(torch.tensor(0.5))
    alone = Classification().loss(IDENTITY, batch)
    assert Classification(aux_weight=0.1).loss(model, batch).item() == pytest.approx(alone.item() + 0.1 * 0.5 * 12)
    assert Classification(aux_weight=0).loss(model, batch) == alone
    assert Classification(aux_weight=0.1).score(model, batch)["loss"] == Classification().score(IDENTITY, batch)["loss"]


def test_logits_beside_the_logits_are_compared_with_the_labels() -> None:
    batch = image_batch()
    more = torch.randn(12, 10, dtype=torch.float64)
    expected = F.cross_entropy(*batch, reduction="sum") + 0.4 * F.cross_entropy(more, batch[1], reduction="sum")
    assert Classification(aux_weight=0.4).loss(Giving(more), batch).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("objective", [Classification(), LanguageModeling()])
def test_something_beside_the_output_is_not_dropped_in_silence(objective: Any) -> None:
    inputs, labels = image_batch()
    batch = (inputs[None], labels[None]) if isinstance(objective, LanguageModeling) else (inputs, labels)
    with pytest.raises(ConfigError, match=r"objective\.aux_weight"):
        objective.loss(Giving(torch.tensor(0.5)), batch)


def test_what_is_found_needs_no_targets_and_is_what_is_saved() -> None:
    inputs, labels = image_batch()
    _, rows = Classification().predict(IDENTITY, (inputs, labels))
    found = Classification().infer(IDENTITY, inputs)
    assert found.keys() < rows.keys()
    assert all(torch.equal(found[name], rows[name]) for name in found)


def test_metrics_compare_probabilities() -> None:
    _, _, (predictions, targets) = Classification().compare(IDENTITY, image_batch())
    assert torch.allclose(predictions.sum(dim=1), torch.ones(12, dtype=torch.float64))
    assert len(targets) == 12
