"""A GPU that is none: tensors of torch's fake kind, which have no values, so that whatever reads one raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda:0")


class Moved(RuntimeError):
    """Something went from one device to another, for which the host waits."""


class RefusesMoves(TorchDispatchMode):
    """Fails where values come from the GPU, or go there from memory that is not pinned (`pin`), or without `non_blocking`.

    Args:
        sends: values may go to the GPU from any memory: where the host is about to wait anyway.
    """

    def __init__(self, *, sends: bool = False) -> None:
        super().__init__()
        self.sends = sends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            goes_there = found.device == CUDA and (self.sends or (is_pinned(source) and (kwargs or {}).get("non_blocking")))
            if source.device.type != found.device.type and source.numel() > 0 and not goes_there:
                raise Moved(f"{name}: from {source.device} to {found.device}")
        return found


_to = Tensor.to


def _moved(values: Tensor, *given: Any, **named: Any) -> Tensor:
    if given and isinstance(given[0], (torch.device, str)):
        return torch.ops.aten._to_copy(values, device=torch.device(given[0]), non_blocking=named.get("non_blocking", False))
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


def _set_part(values: Tensor, index: Any, new: Any) -> None:
    part = _part(values, index)
    torch.ops.aten.copy_(part, new) if isinstance(new, Tensor) else part.fill_(new)


_IN_OTHER_WAYS: dict[str, Any] = {
    "__getitem__": _part,
    "__setitem__": _set_part,
    "__invert__": lambda values: torch.bitwise_not(values),
    "contiguous": lambda values, memory_format=torch.contiguous_format: values.clone(memory_format=memory_format),
    "copy_": lambda values, *given: torch.ops.aten.copy_(values, *given),
    "to": _moved,
}
"""Python's own ways into torch that set the current device, which torch without CUDA cannot."""


@contextmanager
def on_a_gpu(*, sends: bool = False) -> Iterator[RefusesMoves]:
    """Be where tensors can say that they are on a GPU; `sends` of what is yielded may be changed."""
    with patch.multiple(Tensor, **_IN_OTHER_WAYS), FakeTensorMode(), torch.no_grad(), RefusesMoves(sends=sends) as moves:
        yield moves


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


def pin(values: Tensor) -> Tensor:
    """Let a tensor lie in pinned memory, as far as this rig goes."""
    values.is_pinned_here = True  # type: ignore[attr-defined]
    return values


def is_pinned(values: Tensor) -> bool:
    return getattr(values, "is_pinned_here", False)
