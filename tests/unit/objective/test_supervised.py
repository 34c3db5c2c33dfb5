"""What a model returns in addition to its output counts as it is told to, in training alone; a plain loss function is an objective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.supervised import LossObjective, outputs_and_targets, unwrap
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
    rows = Classification().predict(IDENTITY, (inputs, labels)).rows
    found = Classification().infer(IDENTITY, inputs)
    assert found.keys() < rows.keys()
    assert all(torch.equal(found[name], rows[name]) for name in found)


def test_metrics_compare_probabilities() -> None:
    _, _, (predictions, targets) = Classification().compare(IDENTITY, image_batch())
    assert torch.allclose(predictions.sum(dim=1), torch.ones(12, dtype=torch.float64))
    assert len(targets) == 12


A, B, Y = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.tensor([0, 1])


class Adding(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return a if b is None else a + 10 * b


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((A, Y), A), ([A, Y], A), ((A, B, Y), A + 10 * B), ({"b": B, "a": A, "labels": Y}, A + 10 * B), ({"a": A, "target": Y}, A)],
)
def test_inputs_go_to_the_model_by_place_or_by_name(batch: Any, expected: Tensor) -> None:
    outputs, targets = outputs_and_targets(Adding(), batch)
    assert torch.equal(outputs, expected)
    assert targets is Y


@pytest.mark.parametrize("batch", [{"a": A}, {"a": A, "label": Y, "labels": Y}, A, (A,)])
def test_a_batch_that_does_not_tell_its_targets_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError):
        outputs_and_targets(Adding(), batch)


@pytest.mark.parametrize(
    "given",
    [(A, B), {"out": A, "aux": B}, {"logits": A, "aux_loss": B}, SimpleNamespace(logits=A, aux_logits=B, hidden_states=(B, B))],
)
def test_what_counts_and_what_is_beside_it(given: Any) -> None:
    outputs, beside = unwrap(given)
    assert outputs is A
    assert len(beside) == 1 and beside[0] is B


def test_an_output_that_is_not_known_is_refused_with_its_shapes() -> None:
    assert unwrap(A) == (A, [])
    with pytest.raises(TypeError, match="last_hidden_state"):
        unwrap({"last_hidden_state": A})


def test_a_loss_function_must_return_one_number() -> None:
    with pytest.raises(ValueError, match="reduction='mean'"):
        LossObjective(nn.CrossEntropyLoss(reduction="none")).loss(IDENTITY, image_batch())
