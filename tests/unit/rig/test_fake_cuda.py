"""Forwards, evaluation and optimizer steps on tensors that say they are on a GPU: what waits for it, or mixes devices, fails here.

torch's fake tensors have no values, so whatever reads one raises. torch without CUDA cannot record what a backward needs: it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ddp_train.training.build.optimization import make_optimizer
from tests.unit.rig.cases import NAMES, case, node

CUDA = torch.device("cuda:0")
TwoDevices = getattr(fake_tensor, "FakeTensorDeviceMismatchError", RuntimeError)  # which has a name of its own since 2.13


class Moved(RuntimeError):
    """Something went from one device to another, for which the host waits."""


class RefusesMoves(TorchDispatchMode):
    """Fails where values come from the GPU, or go there from memory that is not pinned."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device.type != found.device.type and source.numel() > 0:
                raise Moved(f"{name}: from {source.device} to {found.device}")
        return found


_to = Tensor.to


def _moved(values: Tensor, *given: Any, **named: Any) -> Tensor:
    if given and isinstance(given[0], (torch.device, str)):
        return torch.ops.aten._to_copy(values, device=torch.device(given[0]))
    return _to(values, *given, **named)


def _part(values: Tensor, index: Any) -> Tensor:
    """Return what `values[index]` is."""
    place = 0
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            values = values.unsqueeze(place)
        elif isinstance(each, int):
            values, place = values.select(place, each), place - 1
        elif isinstance(each, slice):
            values = torch.ops.aten.slice(values, place, each.start, each.stop, each.step or 1)
        else:
            assert isinstance(each, Tensor), each
            if each.dtype == torch.bool:
                torch.ops.aten.nonzero(each)  # how many there are is what the host waits for
            values = torch.ops.aten.index.Tensor(values, [None] * place + [each])
        place += 1
    return values


_IN_OTHER_WAYS: dict[str, Any] = {
    "__getitem__": _part,
    "__invert__": lambda values: torch.bitwise_not(values),
    "contiguous": lambda values, memory_format=torch.contiguous_format: values.clone(memory_format=memory_format),
    "copy_": lambda values, *given: torch.ops.aten.copy_(values, *given),
    "to": _moved,
}
"""Python's own ways into torch that set the current device, which torch without CUDA cannot."""


@contextmanager
def on_a_gpu() -> Iterator[None]:
    with patch.multiple(Tensor, **_IN_OTHER_WAYS), FakeTensorMode(), torch.no_grad(), RefusesMoves():
        yield


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Be within `torch.autocast("cuda")`, which turns itself off where torch has no CUDA."""
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or torch.float16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def fake(values: Tensor) -> Tensor:
    return torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=CUDA)


def onto_gpu(module: nn.Module, *, is_trained: bool = False) -> nn.Module:
    """Give a module parameters and buffers that say they are on a GPU. (`to` wants one, and so does what a backward needs.)"""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(fake(parameter), requires_grad=is_trained)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fake(buffer)
    return module


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
            loss = objective.loss(model, batch)
            scored = objective.score(model.eval(), batch)
            totals, rows = objective.predict(model, batch) if hasattr(objective, "predict") else ({}, {})
        weight = objective.weight(batch)
    given = [loss, *scored.values(), *totals.values(), *rows.values(), *([weight] if isinstance(weight, Tensor) else [])]
    assert {value.device for value in given} == {CUDA}
    assert loss.dtype in (torch.float32, torch.float64)


OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "sgd": {}, "muon": {}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_waits_for_no_step_of_an_optimizer(name: str) -> None:
    model, *_ = case("mlp, classification")
    with on_a_gpu():
        onto_gpu(model, is_trained=True)
        optimizer = make_optimizer(node("optimizer", name), model)
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
