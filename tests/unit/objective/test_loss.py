"""A plain loss function as an objective."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from ddp_train.objective.classification import Classification
from ddp_train.objective.loss import LossObjective, as_objective
from tests.unit.objective.batches import IDENTITY, image_batch


def test_a_loss_function_must_return_one_number() -> None:
    with pytest.raises(ValueError, match="reduction='mean'"):
        LossObjective(nn.CrossEntropyLoss(reduction="none")).loss(IDENTITY, image_batch())


def test_as_objective_keeps_an_objective_and_wraps_a_loss() -> None:
    objective = Classification()
    assert as_objective(objective) is objective
    assert isinstance(as_objective(nn.CrossEntropyLoss()), LossObjective)
    assert isinstance(as_objective(F.mse_loss), LossObjective)


def test_as_objective_says_what_is_wrong() -> None:
    class Half:
        def loss(self) -> None: ...

    with pytest.raises(TypeError, match="Half lacks goals, weight, score, metrics"):
        as_objective(Half())
    with pytest.raises(TypeError, match="got the class CrossEntropyLoss, not an instance"):
        as_objective(nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match="got a int"):
        as_objective(3)
