"""Operations are counted as a hand counts them, on shapes alone, and the run is as it was."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train import model_log
from ddp_train.objective.classification import Classification
from ddp_train.objective.distillation import Distillation
from ddp_train.training.record.model_flops import ShapeCopy
from tests.unit.parts import components
from tests.unit.training.ragged import ragged_components

CPU = torch.device("cpu")
BATCH = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))


def test_a_perceptron_takes_what_a_hand_counts() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    forward = 2 * 4 * (8 * 16 + 16 * 3)
    without_input_gradient = 2 * 4 * 8 * 16  # of the first layer, which nobody wants
    assert ShapeCopy(model, Classification()).count(BATCH, CPU) == 3 * forward - without_input_gradient


def test_a_language_model_takes_six_operations_a_parameter_and_token_and_its_attention() -> None:
    parts = ragged_components()
    tokens, targets = parts.train_loader.source.batch(parts.train_loader.order.indices(0, 0, 4))
    counted = ShapeCopy(parts.model, parts.objective).count((tokens, targets), CPU) / tokens.numel()
    matrices = sum(parameter.numel() for parameter in parts.model.parameters() if parameter.ndim == 2)
    assert 6 * matrices * 0.7 < counted < 6 * matrices * 1.3  # the position's embedding is no product; attention is one


def test_what_is_frozen_and_a_teacher_take_no_backward() -> None:
    one = 2 * 4 * 8 * 3  # a product of this size
    model = nn.Linear(8, 3)
    assert ShapeCopy(model, Classification()).count(BATCH, CPU) == 2 * one
    assert ShapeCopy(model, Distillation(teacher=nn.Linear(8, 3))).count(BATCH, CPU) == 3 * one
    frozen = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), model)
    assert ShapeCopy(frozen, Classification()).count(BATCH, CPU) == 2 * one + 2 * 4 * 8 * 8


class Drawing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        random.random()
        torch.rand(1)
        ddp_train.log("drawn", torch.ones((), device=inputs.device))
        return super().forward(inputs)


def test_counting_draws_nothing_logs_nothing_and_leaves_the_model_alone() -> None:
    model, logged = Drawing(8, 3), list[str]()
    before, python = torch.get_rng_state(), random.getstate()
    with model_log.taken_by(lambda name, value: logged.append(name)):
        assert ShapeCopy(model, Classification()).count(BATCH, CPU) > 0
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python
    assert logged == []
    assert model.weight.grad is None and model.weight.device == CPU


class Asking(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1.0 if inputs.sum().item() > 0 else 2.0)


def test_a_model_that_needs_values_cannot_be_counted() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        ShapeCopy(Asking(8, 3), Classification()).count(BATCH, CPU)


def test_an_objective_with_weights_of_its_own_is_counted_with_them() -> None:
    parts = components()
    inputs, labels = parts.train_loader.source.batch(parts.train_loader.order.indices(0, 0, 4))
    assert ShapeCopy(parts.trained, parts.objective).count((inputs, labels), CPU) > 0
