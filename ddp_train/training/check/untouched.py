"""Computing that leaves nothing behind: before the first step, and for callbacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ddp_train.training.parts.components import Components
from ddp_train.training.seeding import random_state, set_random_state


def without_compiling() -> AbstractContextManager[Any]:
    """Run compiled models as they are written: other shapes would be compiled for nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def untouched(components: Components, device: torch.device) -> Iterator[None]:
    """Put back what computing changes: random streams, buffers, modes, and attributes of the model's modules and of the objective."""
    objective = components.objective
    parts = [components.model, objective, *getattr(objective, "__dict__", {}).values()]
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    copies = [buffer.detach().clone() for buffer in buffers]
    dicts = [vars(owner) for owner in [*modules, objective] if hasattr(owner, "__dict__")] + [module._buffers for module in modules]
    before = [dict(each) for each in dicts]
    streams = random_state(device)
    yield  # an error ends the run, and a GPU that failed could not copy
    components.rest()
    set_random_state(streams, device)
    for now, then in zip(dicts, before, strict=True):
        now.clear()
        now.update(then)
    with torch.no_grad():
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)
