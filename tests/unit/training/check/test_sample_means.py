"""Objectives that are wrong: each is refused before the first step, in words and with its key, or it is right after all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.interfaces import Batch, BatchLoss, Objective, Ratio, draw
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.supervised import LossObjective
from ddp_train.training.check.sanity_check import try_first_batches
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.turns import Turns, make_turns
from tests.unit.parts import components
from tests.unit.training.ragged import ragged_components

CLASSES = 10


class Of(Objective):
    """An objective of a function of the model's output and the targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any], values: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        self._loss, self._values = loss, values

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return self._loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Batch) -> Any:
        return super().evaluate(model, batch) if self._values is None else self._values(model(batch[0]), batch[1])


class Same(BatchLoss):
    """Compares samples, and says so."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def tried(objective: Any, parts: Components | None = None) -> None:
    parts = parts or components()
    parts = replace(parts, objective=objective)
    parts = replace(parts, turns=Turns(partial(make_turns, parts.model, objective, parts.strategy, alone())))
    torch.manual_seed(0)
    try_first_batches(parts, next(parts.train_loader.micro_batches(0)), alone(), 0)


def refusal(objective: Any, parts: Components | None = None) -> str:
    with pytest.raises(UserError) as caught:
        tried(objective, parts)
    assert caught.value.key is not None and "objective" in caught.value.key
    return str(caught.value)


def right(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def dice(logits: Tensor, labels: Tensor) -> Tensor:
    probabilities, truth = logits[:, 0].sigmoid(), labels < 5
    return 1 - 2 * (probabilities * truth).sum() / (probabilities + truth).sum()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """Return losses of which those of label 0 are NaN, as the logarithm of nothing is."""
    return F.cross_entropy(logits, labels, reduction="none") + torch.where(labels == 0, torch.nan, 0.0)


def drawn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over those samples that are drawn, whose number is random."""
    mask = draw.bernoulli(torch.full((len(labels),), 0.5))
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


def to_one(logits: Tensor) -> Tensor:
    return logits[:, :1]


WRONG_LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a sum for a mean": (lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"), "Of's loss is the sum over the batch"),
    "too few": (lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")[1:], r"float32 [31] for 32 samples"),
    "each with each": (lambda logits, labels: logits @ logits.T, "float32 [32, 32] for 32 samples"),
    "tokens, as many as samples": (lambda logits, labels: logits.repeat(1, 4)[:, :32].mean(0), "for 16 samples"),
    "a column": (lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")[:, None], "float32 [32, 1] for 32 samples"),
    "broadcast": (lambda logits, labels: (to_one(logits) - labels).square().mean(), "is not the mean of its halves'"),
    "broadcast, of samples": (lambda logits, labels: (to_one(logits) - labels).square().mean(1), "is not the mean of its halves'"),
    "detached": (lambda logits, labels: right(logits.detach(), labels), "does not depend on the parameters"),
    "argmax": (lambda logits, labels: (logits.argmax(1) - labels).float().abs().mean(), "does not depend on the parameters"),
    "the batch axis lost": (lambda logits, labels: F.cross_entropy(logits.mean(0), labels[0]), "is not the mean of its halves'"),
    "the first sample alone": (lambda logits, labels: F.cross_entropy(logits[0], labels[0]), "is not the mean of its halves'"),
    "softmax over the batch": (lambda logits, labels: F.nll_loss(logits.log_softmax(0), labels), "is not the mean of its halves'"),
    "on another device": (lambda logits, labels: right(logits, labels).to("meta"), "loss is on meta, and not on cpu"),
    "NaN where masked": (lambda logits, labels: Ratio(masked(logits, labels) * (labels != 0), labels != 0), "mask with where"),
    "weights of classes": (
        lambda logits, labels: F.cross_entropy(logits, labels, torch.arange(1.0, 11.0)),
        "is not the mean of its halves'",
    ),
    "a mean over those that are drawn": (drawn, "is not the mean of its halves'"),
    "Dice over the batch": (dice, "is not the mean of its halves'"),
    "a mean over a number": (lambda logits, labels: Ratio(right(logits, labels), len(labels)), "is not the mean of its halves'"),
    "a sum over one": (lambda logits, labels: Ratio(right(logits, labels) * len(labels), 1), "a Ratio over an int, which is not as large"),
    "an int that depends on the content": (
        lambda logits, labels: Ratio(F.cross_entropy(logits, labels, reduction="none"), int((labels > 4).sum())),
        "which is not as large for each sample",
    ),
    "a number of Python": (lambda logits, labels: right(logits, labels).item(), "loss gives a float for 32 samples"),
    "a string": (lambda logits, labels: "loss", "loss gives a str"),
    "nothing": (lambda logits, labels: None, "loss gives None"),
    "a dict": (lambda logits, labels: {"loss": right(logits, labels)}, "loss gives {loss: float32 []}"),
    "columns": (lambda logits, labels: Ratio(logits, 1, by_column=True), "loss gives Ratio("),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_wrong_loss_is_refused_in_words(name: str) -> None:
    loss, said = WRONG_LOSSES[name]
    assert said in refusal(Of(loss))


WRONG_VALUES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a sum": (lambda logits, labels: {"loss": F.cross_entropy(logits, labels, reduction="sum")}, "Of's loss is the sum over the batch"),
    "too few": (lambda logits, labels: {"loss": logits[1:, 0]}, "evaluate gives float32 [100] as 'loss' for 101 samples"),
    "matrices": (lambda logits, labels: {"loss": logits}, "evaluate gives float32 [101, 10] as 'loss'"),
    "Dice over the batch": (lambda logits, labels: {"loss": right(logits, labels), "dice": dice(logits, labels)}, "Of's dice of a batch"),
    "on another device": (lambda logits, labels: {"loss": right(logits, labels).to("meta")}, "evaluate's 'loss' is on meta"),
    "a number of Python": (lambda logits, labels: {"loss": 1.0}, "evaluate gives a float as 'loss'"),
    "a string": (lambda logits, labels: {"loss": "low"}, "evaluate gives a str as 'loss'"),
    "nothing": (lambda logits, labels: None, "evaluate gives None, and not values by name"),
    "a list": (lambda logits, labels: [right(logits, labels)], "evaluate gives (float32 []), and not values by name"),
    "columns as numbers": (
        lambda logits, labels: {"by_class": Ratio(F.one_hot(labels, CLASSES), 1, by_column=True)},
        "and not a number",
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_of_an_evaluation_are_refused_in_words(name: str) -> None:
    values, said = WRONG_VALUES[name]
    assert said in refusal(Of(right, values))


def test_metrics_that_ask_for_what_evaluate_does_not_give_are_refused() -> None:
    class Asking(Classification):
        def metrics(self, means: Any) -> dict[str, float]:
            return {"right": means["acuracy"]}

    assert "metrics asks for 'acuracy', and evaluate gives accuracy, accuracy_top5, loss" in refusal(Asking())


def mean_over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def tokens_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none").view_as(targets)
    return losses, targets != -100


def test_a_mean_over_the_tokens_that_count_is_refused_also_of_a_fresh_model() -> None:
    """All its losses are alike, to 1e-3: the gradient tells."""
    assert "is not the mean of its halves'" in refusal(Of(mean_over_tokens), ragged_components())
    whole = components("loader.micro_batch_size=32")
    nn.init.zeros_(whole.model.head.weight)  # type: ignore[union-attr]
    nn.init.zeros_(whole.model.head.bias)  # type: ignore[union-attr]
    weighted = WRONG_LOSSES["weights of classes"][0]
    assert "Of's gradient of a batch is not the mean" in refusal(Of(weighted), whole)
    assert "Of's gradient of a batch is not the mean" in refusal(Of(WRONG_LOSSES["broadcast"][0]), whole)


RIGHT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the mean": right,
    "of each sample": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    "a weighted mean": lambda logits, labels: Ratio(F.cross_entropy(logits, labels, reduction="none") * labels, labels),
    "a denominator of another set": lambda logits, labels: Ratio(F.cross_entropy(logits, labels, reduction="none"), labels > 4),
    "masked with where": lambda logits, labels: Ratio(masked(logits, labels).where(labels != 0, 0.0), labels != 0),
    "an int": lambda logits, labels: Ratio(logits.square(), logits.numel()),
    "nothing that counts": lambda logits, labels: Ratio(logits.sum() * 0.0, (labels < 0).sum()),
    "at random": lambda logits, labels: F.cross_entropy(logits, labels) * torch.rand(()),  # which tells nothing
}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 7, 32])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_trained_on(name: str, micro_batch_size: int) -> None:
    tried(Of(RIGHT[name]), components(f"loader.micro_batch_size={micro_batch_size}"))


@pytest.mark.parametrize(
    "objective",
    [Classification(label_smoothing=0.1), LossObjective(nn.CrossEntropyLoss(torch.arange(10.0), reduction="none")), Same()],
)
def test_ours_and_what_says_that_it_compares_samples_are_trained_on(objective: Any) -> None:
    tried(objective)


def test_tokens_that_count_are_trained_on_as_a_ratio() -> None:
    for objective in (LanguageModeling(ignore_index=-100), Of(lambda logits, targets: Ratio(*tokens_of(logits, targets)))):
        tried(objective, ragged_components())


def test_half_precision_is_given_more_room() -> None:
    tried(Classification(), components("amp=bf16"))
    assert "is the sum" in refusal(Of(WRONG_LOSSES["a sum for a mean"][0]), components("amp=bf16"))


def test_a_loss_with_noise_of_each_sample_is_trained_on_whatever_is_drawn() -> None:
    """Two equal calls may draw nearly the same by chance, and the halves something else."""
    parts = components("loader.micro_batch_size=8")
    parts = replace(parts, objective=Of(lambda logits, labels: F.cross_entropy(logits + 0.3 * torch.randn_like(logits), labels)))
    first = next(parts.train_loader.micro_batches(0))
    for seed in range(20):
        torch.manual_seed(seed)
        try_first_batches(parts, first, alone(), 0)
