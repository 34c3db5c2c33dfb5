"""What all objectives have in common: sums that add up over any split, in types that lose nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.loss import LossObjective
from tests.unit.objective.batches import IDENTITY, SPLITS, add_up, image_batch, token_model_and_batch


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize(
    "objective", [Classification(), Classification(label_smoothing=0.1), LossObjective(nn.CrossEntropyLoss(label_smoothing=0.1))]
)
def test_sums_over_samples_add_up_over_any_split(objective: Any, sizes: list[int]) -> None:
    batch = image_batch()
    whole_loss, whole_weight, whole_totals = add_up(objective, IDENTITY, batch, [12])
    loss, weight, totals = add_up(objective, IDENTITY, batch, sizes)
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    assert weight == whole_weight == 12
    assert totals.pop("loss").item() == pytest.approx(whole_totals.pop("loss").item(), rel=1e-12)
    assert totals == whole_totals  # the counts: exactly


def test_counts_are_integers_and_sums_are_double() -> None:
    model, tokens = token_model_and_batch()
    for totals in (Classification().score(IDENTITY, image_batch()), LanguageModeling(ignore_index=3).score(model, tokens)):
        assert totals.pop("loss").dtype == torch.float64
        assert totals and {value.dtype for value in totals.values()} == {torch.int64}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_single_precision(dtype: torch.dtype) -> None:
    logits_BK, labels_B = torch.zeros(70_000, 2, dtype=dtype), torch.zeros(70_000, dtype=torch.int64)
    expected = pytest.approx(70_000 * math.log(2), rel=1e-5)  # float16 ends at 65,504; bfloat16 has 8 bits
    assert Classification().loss(IDENTITY, (logits_BK, labels_B)).item() == expected
    assert LanguageModeling().loss(IDENTITY, (logits_BK[None], labels_B[None])).item() == expected
