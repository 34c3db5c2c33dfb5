"""Forwards, evaluation and optimizer steps on tensors that say they are on a GPU: what waits for it, or mixes devices, fails here.

torch's fake tensors have no values, so whatever reads one raises. torch without CUDA cannot record what a backward needs: it is left out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only

from ddp_train.interfaces.objective import evaluate_batch, loss_sum, value_sums
from ddp_train.training.build.make import make_optimizer
from tests.unit.rig.cases import NAMES, SAMPLES, case, config_of
from tests.unit.rig.fake_gpu import CUDA, Moved, autocast, fake, on_a_gpu, onto_gpu

TwoDevices = getattr(fake_tensor, "FakeTensorDeviceMismatchError", RuntimeError)  # which has a name of its own since 2.13


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_no_forward_and_all_is_on_one_device(name: str, dtype: torch.dtype | None) -> None:
    model, objective, batch = case(name)
    with on_a_gpu():
        onto_gpu(model)
        if isinstance(objective, nn.Module):
            onto_gpu(objective)
        batch = tree_map_only(Tensor, fake, batch)
        with autocast(dtype):
            loss = loss_sum(objective, model, batch)
            measured = evaluate_batch(objective, model.eval(), batch)
        sums = [each for name, value in measured.values.items() for each in value_sums(name, value, SAMPLES)]
    given = [*loss, *sums, *measured.rows.values(), *(measured.compared or ())]
    assert {value.device for value in given if isinstance(value, Tensor)} == {CUDA}
    assert loss.total.dtype in (torch.float32, torch.float64)


OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "sgd": {}, "muon": {}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_waits_for_no_step_of_an_optimizer(name: str) -> None:
    model, *_ = case("mlp, classification")
    with on_a_gpu():
        onto_gpu(model, is_trained=True)
        optimizer = make_optimizer(config_of("optimizer", name), model)
        for _ in range(2):  # the first makes the state
            for parameter in model.parameters():
                parameter.grad = fake(parameter)
            optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor) and value.ndim]
    assert all(value.device == CUDA for value in state)


WAITS = {
    "item": lambda values: values.sum().item(),
    "a condition": lambda values: 1 if values.sum() > 0 else 2,
    "a mask": lambda values: values[values > 0],
    "cpu": lambda values: values.cpu(),
    "to the GPU": lambda values: torch.ones(3).to(CUDA),
    "two devices": lambda values: values + torch.ones(3),
}
"""What must be found."""


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_gpu_is_found(name: str) -> None:
    with on_a_gpu():
        values = torch.empty(3, device=CUDA)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, Moved, TwoDevices)):
            WAITS[name](values)
        values + torch.ones((), device=CUDA)
