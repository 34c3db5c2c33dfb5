"""Objectives: sums that add up over any split, integer counts, and metrics that are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.interfaces import batch_size
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.loss import LossObjective, as_objective

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


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("ignore_index", [None, 3])
def test_sums_over_tokens_add_up_over_any_split(ignore_index: int | None, sizes: list[int]) -> None:
    objective = LanguageModeling(ignore_index=ignore_index)
    model, batch = token_model_and_batch()
    whole_loss, whole_weight, whole_totals = add_up(objective, model, batch, [12])
    loss, weight, totals = add_up(objective, model, batch, sizes)
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    assert weight == whole_weight == (48 if ignore_index is None else int((batch[1] != 3).sum()))
    assert totals.pop("loss").item() == pytest.approx(whole_totals.pop("loss").item(), rel=1e-12)
    assert totals == whole_totals
    assert totals["tokens"] == whole_weight


@pytest.mark.parametrize("sizes", SPLITS)
def test_the_gradient_of_the_sums_does_not_depend_on_the_split(sizes: list[int]) -> None:
    objective = LanguageModeling(ignore_index=3)
    model, batch = token_model_and_batch()
    objective.loss(model, batch).backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    whole, weight.grad = weight.grad.clone(), None
    for part in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        objective.loss(model, part).backward()
    torch.testing.assert_close(weight.grad, whole, rtol=1e-12, atol=1e-12)


def test_counts_are_integers_and_sums_are_double() -> None:
    model, tokens = token_model_and_batch()
    for totals in (Classification().score(IDENTITY, image_batch()), LanguageModeling(ignore_index=3).score(model, tokens)):
        assert totals.pop("loss").dtype == torch.float64
        assert totals and {value.dtype for value in totals.values()} == {torch.int64}


def test_correct_and_top5_count_what_they_say() -> None:
    logits_BK = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3]] * 4)
    totals = Classification().score(IDENTITY, (logits_BK, torch.tensor([0, 4, 5, 0])))  # first, fifth, sixth, first
    assert {name: totals[name].item() for name in ("samples", "correct", "correct_top5")} == {"samples": 4, "correct": 2, "correct_top5": 3}
    metrics = Classification().metrics({name: value.item() for name, value in totals.items()})
    assert list(metrics) == list(Classification().goals)
    assert metrics["accuracy"] == 0.5
    assert metrics["accuracy_top5"] == 0.75


def test_top5_is_absent_where_it_would_always_be_right() -> None:
    totals = Classification().score(IDENTITY, image_batch(num_classes=5))
    assert "correct_top5" not in totals
    assert list(Classification().metrics({name: value.item() for name, value in totals.items()})) == ["accuracy", "loss"]


def test_label_smoothing_changes_the_loss_and_not_the_metrics() -> None:
    batch = image_batch()
    plain, smooth = Classification(), Classification(label_smoothing=0.2)
    assert plain.loss(IDENTITY, batch).item() == pytest.approx(F.cross_entropy(*batch, reduction="sum").item())
    assert smooth.loss(IDENTITY, batch).item() == pytest.approx(F.cross_entropy(*batch, reduction="sum", label_smoothing=0.2).item())
    assert plain.score(IDENTITY, batch)["loss"] == smooth.score(IDENTITY, batch)["loss"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_single_precision(dtype: torch.dtype) -> None:
    logits_BK, labels_B = torch.zeros(70_000, 2, dtype=dtype), torch.zeros(70_000, dtype=torch.int64)
    expected = pytest.approx(70_000 * math.log(2), rel=1e-5)  # float16 ends at 65,504; bfloat16 has 8 bits
    assert Classification().loss(IDENTITY, (logits_BK, labels_B)).item() == expected
    assert LanguageModeling().loss(IDENTITY, (logits_BK[None], labels_B[None])).item() == expected


def test_perplexity_and_bits_per_byte_of_a_uniform_guess_are_the_vocabulary() -> None:
    objective = LanguageModeling(bytes_per_token=4.0)
    totals = objective.score(IDENTITY, (torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)))
    metrics = objective.metrics({name: value.item() for name, value in totals.items()})
    assert list(metrics) == list(objective.goals) == ["loss", "perplexity", "bits_per_byte"]
    assert metrics == pytest.approx({"loss": math.log(256), "perplexity": 256, "bits_per_byte": 8 / 4})


def test_bits_per_byte_is_absent_where_the_bytes_are_unknown() -> None:
    objective = LanguageModeling()
    assert list(objective.metrics({"loss": 2.0, "tokens": 1.0})) == list(objective.goals) == ["loss", "perplexity"]


def test_a_huge_loss_gives_infinite_perplexity_and_no_crash() -> None:
    assert LanguageModeling().metrics({"loss": 1e6, "tokens": 1.0})["perplexity"] == math.inf


def test_token_weight_is_a_plain_int_unless_targets_must_be_read() -> None:
    _, batch = token_model_and_batch()
    assert type(LanguageModeling().weight(batch)) is int
    weight = LanguageModeling(ignore_index=0).weight(batch)
    assert isinstance(weight, Tensor) and weight.dtype == torch.int64 and weight.shape == ()


def test_a_negative_target_is_an_error_unless_it_was_said_to_be_ignored() -> None:
    batch = (torch.zeros(1, 2, 5), torch.tensor([[1, -100]]))
    assert LanguageModeling(ignore_index=-100).loss(IDENTITY, batch).item() == pytest.approx(math.log(5))
    with pytest.raises(IndexError, match="-100"):
        LanguageModeling().loss(IDENTITY, batch)


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


def test_batch_size_is_the_first_dimension_of_the_first_tensor() -> None:
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size(({"temperature": torch.tensor(1.0), "image": [torch.zeros(5, 1)]}, torch.zeros(7))) == 5
    with pytest.raises(TypeError, match="found none in a dict"):
        batch_size({"name": "cat"})
