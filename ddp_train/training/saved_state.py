"""What a checkpoint holds: the parts of a run that have a state. A part that is added to `parts` is saved and comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from ddp_train.checkpoint import codec
from ddp_train.distributed.world import World
from ddp_train.joint import Joint
from ddp_train.training.build import Components
from ddp_train.training.state import TrainState, WindowSums, random_state


class Stateful(Protocol):
    """What has a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def parts(components: Components, state: TrainState) -> dict[str, Stateful]:
    """Return what has a state that is the same on every rank, beside modules and optimizer, whose keys are compared on loading."""
    return {"scheduler": components.scheduler, "scaler": components.scaler, "state": state}


def hashes(components: Components, state: TrainState) -> dict[str, str]:
    """Return a hash of each part: of what all ranks should have, and nothing keeps alike."""
    found = {}
    for name, part in parts(components, state).items():
        plain, tensors = codec.encode(part.state_dict(), name)
        each = xxhash.xxh3_128(json.dumps(plain, sort_keys=True).encode())
        for tensor in tensors.values():
            each.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        found[name] = each.hexdigest()
    return found


def modules(components: Components) -> dict[str, nn.Module]:
    """Return the modules that have weights: the model, and an objective of that kind."""
    return dict(components.trained.named_children()) if isinstance(components.trained, Joint) else {"model": components.model}


def shared_state(components: Components, state: TrainState) -> dict[str, Any]:
    """Return what is the same on every rank."""
    states = {name: module.state_dict() for name, module in modules(components).items()}
    return {
        **states,
        # Of the modules' own formats, which torch keeps beside the tensors.
        **{f"{name}_versions": getattr(each, "_metadata", {}) for name, each in states.items()},
        "optimizer": components.optimizer.state_dict(),
        "optimizer_class": class_of(components.optimizer),
        **{name: part.state_dict() for name, part in parts(components, state).items()},
    }


def own_state(components: Components, state: TrainState, window: WindowSums, world: World) -> dict[str, Any]:
    """Return what is this rank's alone."""
    return {
        "random": random_state(world.device),
        "window": asdict(window),
        "data": components.train_loader.state_dict(state.samples),
    }


def may_be_infinite(components: Components) -> Callable[[str], bool]:
    """Return what tells of a tensor's name whether infinity is no sign of lost weights: a buffer may hold a mask."""
    found = modules(components).items()
    buffers = {f"{part}.{name}" for part, module in found for name, _ in module.named_buffers(remove_duplicate=False)}
    return lambda name: name in buffers


def class_of(value: object) -> str:
    """Return the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
