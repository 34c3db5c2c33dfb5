"""What all objectives have in common: losses and metrics are those of any split, in types that lose nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.interfaces.objective import evaluate_batch, loss_sum, value_sums
from ddp_train.objective.binary import Binary, Multilabel
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.regression import Regression
from ddp_train.objective.segmentation import Segmentation
from ddp_train.objective.supervised import LossObjective
from tests.unit.objective.batches import IDENTITY, SPLITS, image_batch, mean_loss, parts_of, reported, token_model_and_batch


def _answers(*shape: int) -> Tensor:
    return torch.randint(2, shape).double()


_MakesBatch = Callable[[], tuple[Tensor, Tensor]]
OBJECTIVES: dict[str, tuple[Any, _MakesBatch]] = {
    "classification": (Classification(), image_batch),
    "classification smoothed": (Classification(label_smoothing=0.1), image_batch),
    "a mean": (LossObjective(nn.CrossEntropyLoss(label_smoothing=0.1)), image_batch),
    "values of samples": (LossObjective(nn.CrossEntropyLoss(reduction="none")), image_batch),
    "language modelling": (LanguageModeling(), lambda: token_model_and_batch()[1]),
    "language modelling with padding": (LanguageModeling(ignore_index=3), lambda: token_model_and_batch()[1]),
    "regression": (Regression(), lambda: (torch.randn(12, 3).double(), torch.randn(12, 3).double())),
    "regression mae": (Regression(criterion="mae"), lambda: (torch.randn(12).double(), torch.randn(12).double())),
    "binary": (Binary(positive_weight=2.0), lambda: (torch.randn(12).double(), _answers(12))),
    "multilabel": (Multilabel(), lambda: (torch.randn(12, 4).double(), _answers(12, 4))),
    "segmentation": (Segmentation(ignore_index=2), lambda: (torch.randn(12, 3, 5, 4).double(), torch.randint(3, (12, 5, 4)))),
}


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_metrics_are_those_of_any_split(name: str, sizes: list[int]) -> None:
    objective, make = OBJECTIVES[name]
    torch.manual_seed(0)
    batch = make()
    model = token_model_and_batch()[0] if isinstance(objective, LanguageModeling) else IDENTITY
    parts = list(parts_of(batch, sizes))
    assert mean_loss(objective, model, *parts) == pytest.approx(mean_loss(objective, model, batch), rel=1e-12)
    metrics, whole_metrics = reported(objective, model, *parts), reported(objective, model, batch)
    assert list(metrics) == list(whole_metrics)
    for key, value in metrics.items():
        assert value == pytest.approx(whole_metrics[key], rel=1e-12), key


def test_counts_are_integers_and_sums_are_double() -> None:
    model, tokens = token_model_and_batch()
    cases = ((Classification(), IDENTITY, image_batch()), (LanguageModeling(ignore_index=3), model, tokens))
    for objective, its_model, batch in cases:
        for name, value in evaluate_batch(objective, its_model, batch).values.items():
            numerator, denominator = value_sums(name, value, 12)
            assert numerator.dtype == (torch.float64 if name == "loss" else torch.int64)
            assert isinstance(denominator, int) or denominator.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_single_precision(dtype: torch.dtype) -> None:
    logits_BK, labels_B = torch.zeros(70_000, 2, dtype=dtype), torch.zeros(70_000, dtype=torch.int64)
    expected = pytest.approx(70_000 * math.log(2), rel=1e-3)  # float16 ends at 65,504; bfloat16 has 8 bits
    for objective, batch in ((Classification(), (logits_BK, labels_B)), (LanguageModeling(), (logits_BK[None], labels_B[None]))):
        assert loss_sum(objective, IDENTITY, batch).total.item() == expected
    each = torch.full((70_000,), math.log(2), dtype=dtype)  # losses of samples in half precision
    assert loss_sum(LossObjective(lambda outputs, targets: outputs), IDENTITY, (each, labels_B)).total.dtype == torch.float32
    assert loss_sum(LossObjective(lambda outputs, targets: outputs), IDENTITY, (each, labels_B)).total.item() == pytest.approx(
        70_000 * each[0].item(), rel=1e-5
    )
