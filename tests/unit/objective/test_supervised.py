"""What a model returns in addition to its output counts as it is told to, in training alone; a plain loss function is an objective."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train import model_log
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Evaluated, LossModule, Objective, Ratio, TurnObjective
from ddp_train.interfaces.objective import module_of
from ddp_train.objective.classification import Classification
from ddp_train.objective.language_modeling import LanguageModeling
from ddp_train.objective.supervised import LossObjective, StepObjective, outputs_and_targets, unwrap, with_aux
from ddp_train.training.build.make import as_objective
from ddp_train.traits import name_of
from tests.unit.objective.batches import IDENTITY, image_batch, mean_loss, reported


class Giving(nn.Module):
    def __init__(self, aux: Any) -> None:
        super().__init__()
        self.aux = aux

    def forward(self, inputs: Tensor) -> Any:
        return inputs, self.aux


def test_a_loss_beside_the_logits_counts_for_each_sample() -> None:
    batch, model = image_batch(), Giving(torch.tensor(0.5))
    alone = mean_loss(Classification(), IDENTITY, batch)
    assert mean_loss(Classification(aux_weight=0.1), model, batch) == pytest.approx(alone + 0.1 * 0.5)
    assert mean_loss(Classification(aux_weight=0), model, batch) == alone
    assert reported(Classification(aux_weight=0.1), model, batch) == reported(Classification(), IDENTITY, batch)


def test_logits_beside_the_logits_are_compared_with_the_labels() -> None:
    batch = image_batch()
    more = torch.randn(12, 10, dtype=torch.float64)
    expected = F.cross_entropy(*batch) + 0.4 * F.cross_entropy(more, batch[1])
    assert mean_loss(Classification(aux_weight=0.4), Giving(more), batch) == pytest.approx(expected.item())


def test_what_is_added_to_a_ratio_is_a_mean_over_the_same_or_over_samples() -> None:
    loss = Ratio(torch.tensor([2.0, 4.0]), torch.tensor([1, 3]))
    for aux in (torch.tensor(0.5), Ratio(torch.tensor(2.0), 4)):
        total = with_aux(loss, aux, 0.1)
        assert isinstance(total, Ratio)
        assert total.numerator.item() == pytest.approx(6 + 0.1 * 0.5 * 4)
        assert total.denominator is loss.denominator


@pytest.mark.parametrize("objective", [Classification(), LanguageModeling()])
def test_something_beside_the_output_is_not_dropped_in_silence(objective: Any) -> None:
    inputs, labels = image_batch()
    batch = (inputs[None], labels[None]) if isinstance(objective, LanguageModeling) else (inputs, labels)
    with pytest.raises(ConfigError, match=r"objective\.aux_weight"):
        objective.loss(Giving(torch.tensor(0.5)), batch)


def test_what_is_found_needs_no_targets_and_is_what_is_saved() -> None:
    inputs, labels = image_batch()
    rows = Classification().evaluate(IDENTITY, (inputs, labels)).rows
    found = Classification().infer(IDENTITY, inputs)
    assert found.keys() < rows.keys()
    assert all(torch.equal(found[name], rows[name]) for name in found)


def test_metrics_compare_probabilities() -> None:
    compared = Classification().evaluate(IDENTITY, image_batch()).compared
    assert compared is not None
    predictions, targets = compared
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


def test_as_objective_keeps_an_objective_and_wraps_a_loss() -> None:
    objective = Classification()
    assert as_objective(objective) is objective
    assert isinstance(as_objective(nn.CrossEntropyLoss()), LossObjective)
    assert isinstance(as_objective(F.mse_loss), LossObjective)


def test_as_objective_says_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="gave the class CrossEntropyLoss, not an instance"):
        as_objective(nn.CrossEntropyLoss)
    with pytest.raises(ConfigError, match="gave a int"):
        as_objective(3)
    with pytest.raises(ConfigError, match=r"objective\.reduction: is mean.*ranks[\s\S]*\+objective\.reduction=none"):
        as_objective(nn.CrossEntropyLoss(torch.ones(3)))
    assert isinstance(as_objective(nn.CrossEntropyLoss(torch.ones(3), reduction="none")), LossObjective)


class Foreign:
    """An objective that does not know this package."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.share * F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class ForeignModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]) / self.temperature, batch[1])

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        return Evaluated({"right": model(batch[0]).argmax(1) == batch[1]})


@dataclass(frozen=True)
class Frozen:
    share: float = 2.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.share * F.cross_entropy(model(batch[0]), batch[1])


class Slotted:
    __slots__ = ("share",)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0]).mean()


class Turning:
    turns = {"a": ["a"], "b": ["b"]}  # noqa: RUF012

    def turn_loss(self, model: nn.Module, batch: Batch, turn: str) -> Tensor:
        return model(batch[0]).mean() * (1 if turn == "a" else 2)


def test_an_objective_of_another_class_gets_what_it_lacks() -> None:
    batch = image_batch()
    objective = as_objective(Foreign())
    assert isinstance(objective, Objective) and name_of(objective) == "Foreign"
    assert as_objective(objective) is objective
    assert objective.goals == {"loss": "min"} and objective.unit == "sample"
    expected = 0.5 * F.cross_entropy(*batch).item()
    assert reported(objective, IDENTITY, batch) == {"loss": pytest.approx(expected)}
    assert mean_loss(deepcopy(objective), IDENTITY, batch) == pytest.approx(expected)
    assert objective.infer(IDENTITY, batch[0])["output"] is batch[0]
    assert mean_loss(as_objective(Frozen()), IDENTITY, batch) == pytest.approx(4 * expected)
    assert mean_loss(as_objective(Slotted()), IDENTITY, batch) == pytest.approx(batch[0].mean().item())


def test_a_module_of_another_class_keeps_its_parameters_names() -> None:
    batch, objective = image_batch(), as_objective(ForeignModule())
    assert [name for name, _ in LossModule(IDENTITY, objective).named_parameters()] == ["objective.temperature"]
    copy = deepcopy(objective)
    assert module_of(copy) is not module_of(objective)
    assert mean_loss(copy, IDENTITY, batch) == pytest.approx(F.cross_entropy(*batch).item())
    assert list(reported(copy, IDENTITY, batch)) == ["right"]


def test_turns_of_another_class_are_evaluated_by_name() -> None:
    batch, objective = image_batch(), as_objective(Turning())
    assert isinstance(objective, TurnObjective) and objective.turns_at(3) == ["a", "b"]
    mean = batch[0].mean().item()
    assert reported(objective, IDENTITY, batch) == pytest.approx({"loss_a": mean, "loss_b": 2 * mean})


def test_a_loss_function_that_keeps_another_one_under_the_name_loss_is_a_loss_function() -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = 2 * self.loss(outputs, targets)
            return loss

    batch, objective = image_batch(), as_objective(Wrapping())
    assert isinstance(objective, LossObjective)
    assert mean_loss(objective, IDENTITY, batch) == pytest.approx(2 * F.cross_entropy(*batch).item())


def test_a_function_of_model_and_batch_is_a_step() -> None:
    def step(model: nn.Module, batch: Batch, *, scale: float) -> dict[str, Any]:
        logits = model(batch[0])
        return {"loss": scale * F.cross_entropy(logits, batch[1]), "right": logits.argmax(1) == batch[1], "ratio": Ratio(logits, 2)}

    step.goals = {"right": "max"}  # type: ignore[attr-defined]
    objective = as_objective(partial(step, scale=2.0))
    assert objective.goals == {"right": "max"}
    logged: dict[str, float] = {}
    with model_log.taken_by(lambda name, value: logged.update({name: float(value)})):
        loss = mean_loss(objective, IDENTITY, image_batch())
    assert loss == pytest.approx(2 * F.cross_entropy(*image_batch()).item())
    assert logged == pytest.approx({"right": reported(objective, IDENTITY, image_batch())["right"]})  # in training no ratio


def test_either_name_of_its_arguments_tells_a_step_from_a_loss_function() -> None:
    assert isinstance(as_objective(lambda model, data: model(data)), StepObjective)
    assert isinstance(as_objective(lambda net, batch: net(batch)), StepObjective)
    assert isinstance(as_objective(lambda outputs, targets: outputs), LossObjective)
    assert isinstance(as_objective(torch.dist), LossObjective)  # it has no signature


def test_a_step_without_a_loss_is_told_so() -> None:
    def step(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"accuracy": model(batch[0]).sum(1)}

    with pytest.raises(TypeError, match="and no loss"):
        mean_loss(as_objective(step), IDENTITY, image_batch())
