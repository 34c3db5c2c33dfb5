"""Language modelling: sums over tokens that add up over any split, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddp_train.objective.language_modeling import LanguageModeling
from tests.unit.objective.batches import IDENTITY, SPLITS, add_up, token_model_and_batch


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
