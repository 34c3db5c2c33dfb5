"""What all objectives have in common: sums that add up over any split, in types that lose nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.objective.binary import Binary, Multilabel
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.regression import Regression
from ddp_train.objective.segmentation import Segmentation
from ddp_train.objective.supervised import LossObjective
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


def _answers(*shape: int) -> Tensor:
    return torch.randint(2, shape).double()


OTHERS: dict[str, tuple[Any, Callable[[], tuple[Tensor, Tensor]]]] = {
    "regression": (Regression(), lambda: (torch.randn(12, 3).double(), torch.randn(12, 3).double())),
    "regression mae": (Regression(criterion="mae"), lambda: (torch.randn(12).double(), torch.randn(12).double())),
    "binary": (Binary(positive_weight=2.0), lambda: (torch.randn(12).double(), _answers(12))),
    "multilabel": (Multilabel(), lambda: (torch.randn(12, 4).double(), _answers(12, 4))),
    "segmentation": (Segmentation(ignore_index=2), lambda: (torch.randn(12, 3, 5, 4).double(), torch.randint(3, (12, 5, 4)))),
}


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("name", OTHERS)
def test_losses_scores_and_metrics_of_the_others_are_those_of_any_split(name: str, sizes: list[int]) -> None:
    objective, make = OTHERS[name]
    torch.manual_seed(0)
    batch = make()

    def over(parts: list[int]) -> tuple[float, dict[str, Any]]:
        loss, weight, totals = 0.0, 0, dict[str, Tensor]()
        for part in zip(batch[0].split(parts), batch[1].split(parts), strict=True):
            loss, weight = loss + objective.loss(IDENTITY, part).item(), weight + int(objective.weight(part))
            for key, value in objective.score(IDENTITY, part).items():
                totals[key] = totals.get(key, torch.zeros_like(value)) + value
        return loss / weight, objective.metrics({key: value.tolist() for key, value in totals.items()})

    loss, metrics = over(sizes)
    whole_loss, whole_metrics = over([12])
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    assert metrics.keys() == whole_metrics.keys()
    for key, value in metrics.items():
        assert value == pytest.approx(whole_metrics[key], rel=1e-12), key


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
