"""Yes or no: metrics that are right, of one question and of several labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddp_train.objective.binary import Binary, Multilabel
from tests.unit.objective.batches import IDENTITY, reported

LOGITS = torch.tensor([[2.0], [1.0], [-1.0], [-2.0], [3.0]])
ANSWERS = torch.tensor([1, 0, 1, 0, 1])  # hit, false yes, false no, right no, hit


@pytest.mark.parametrize("logits", [LOGITS, LOGITS[:, 0]])
def test_counts_of_one_question(logits: torch.Tensor) -> None:
    objective = Binary(positive_weight=3.0)
    plain = F.binary_cross_entropy_with_logits(LOGITS[:, 0], ANSWERS.float())
    expected = {"accuracy": 0.6, "f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3, "loss": plain.item()}
    assert reported(objective, IDENTITY, (logits, ANSWERS)) == pytest.approx(expected)
    assert list(expected) == list(Binary.goals)
    weighted = F.binary_cross_entropy_with_logits(LOGITS[:, 0], ANSWERS.float(), pos_weight=torch.tensor(3.0))
    assert objective.loss(IDENTITY, (logits, ANSWERS)).item() == pytest.approx(weighted.item())
    compared = objective.evaluate(IDENTITY, (logits, ANSWERS)).compared
    assert compared is not None
    probabilities, answers = compared
    assert probabilities.shape == answers.shape == (5,)


def test_labels_that_come_together() -> None:
    logits = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0]])
    answers = torch.tensor([[1, 0, 0], [1, 1, 0]])
    found = reported(Multilabel(), IDENTITY, (logits, answers))
    assert found.pop("loss") == pytest.approx(F.binary_cross_entropy_with_logits(logits, answers.float()).item())
    assert found == pytest.approx({"f1": 6 / 7, "exact": 0.5, "precision": 0.75, "recall": 1.0})


def test_without_a_yes_nothing_is_found_and_nothing_is_nan() -> None:
    found = reported(Binary(), IDENTITY, (-LOGITS.abs(), torch.zeros(5)))
    assert found["accuracy"] == 1.0
    assert found["f1"] == found["precision"] == found["recall"] == 0.0


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one logit a sample"):
        Binary().loss(IDENTITY, (torch.zeros(4, 2), torch.zeros(4)))
    with pytest.raises(ValueError, match=r"not both \[B, K\]"):
        Multilabel().loss(IDENTITY, (torch.zeros(4, 2), torch.zeros(4)))
