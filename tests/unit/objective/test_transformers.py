"""Models that return their own loss: it is weighed by what it is the mean over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces.objective import loss_sum
from ddp_train.objective.transformers import Transformers
from tests.unit.objective.batches import mean_loss, reported


class TinyForCausalLM(nn.Module):
    """As Hugging Face's: shifts the labels, ignores -100, returns the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 13)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.table(input_ids)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class TinyForSequenceClassification(nn.Module):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(inputs, labels), "logits": inputs}


class TwoLosses(nn.Module):
    def forward(self, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": labels}


def met(model: nn.Module) -> Transformers:
    objective = Transformers()
    objective.bind_model(model)
    return objective


def test_tokens_weigh_the_same_however_the_batch_is_split() -> None:
    torch.manual_seed(0)
    model = TinyForCausalLM()
    tokens = torch.randint(13, (6, 5))
    labels = tokens.clone()
    labels[2:, 3:] = -100
    objective = met(model)
    assert objective.unit == "next_token"
    whole = {"input_ids": tokens, "labels": labels}
    parts = [{name: value[rows] for name, value in whole.items()} for rows in (slice(0, 2), slice(2, 6))]
    assert loss_sum(objective, model, whole).num_units == 2 * 4 + 4 * 2
    metrics, expected = reported(objective, model, *parts), pytest.approx(model(**whole)["loss"].item())
    assert metrics["loss"] == expected
    assert mean_loss(objective, model, *parts) == expected
    assert set(metrics) == {"loss", "perplexity"}


def test_labels_that_are_all_ignored_cost_nothing() -> None:
    model = TinyForCausalLM()
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.full((2, 3), -100)}
    total, num_units, _ = loss_sum(met(model), model, batch)
    assert total.item() == num_units == 0
    total.backward()
    assert not model.table.weight.grad.any()  # type: ignore[union-attr]


def test_one_label_for_each_sample() -> None:
    model, objective = TinyForSequenceClassification(), met(TinyForSequenceClassification())
    batch = {"inputs": torch.eye(4)[[0, 1, 2]], "labels": torch.tensor([0, 1, 3])}
    assert loss_sum(objective, model, batch).num_units == 3
    assert reported(objective, model, batch) == pytest.approx({"loss": model(**batch)["loss"].item(), "accuracy": 2 / 3})
    assert objective.evaluate(model, batch).rows["prediction"].tolist() == [0, 1, 2]


def test_what_cannot_be_known_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"objective\.unit"):
        met(nn.Linear(2, 2))
    with pytest.raises(KeyError, match="labels"):
        Transformers(unit="sample").loss(TwoLosses(), {"input": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"loss is float32 \[2\]"):
        Transformers(unit="sample").loss(TwoLosses(), {"labels": torch.zeros(2)})
