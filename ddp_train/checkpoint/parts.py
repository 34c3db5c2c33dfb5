"""What a checkpoint holds: the parts of a run that have a state. A part that is added to `parts` is saved and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from torch import nn

from ddp_train.build import Components
from ddp_train.distributed import World
from ddp_train.state import TrainState, WindowSums, random_state


class Stateful(Protocol):
    """What has a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def parts(components: Components, state: TrainState) -> dict[str, Stateful]:
    """Return what has a state that is the same on every rank, beside model and optimizer, whose keys are compared when they are loaded."""
    return {"scheduler": components.scheduler, "scaler": components.scaler, "state": state}


def shared_state(components: Components, state: TrainState) -> dict[str, Any]:
    """Return what is the same on every rank."""
    model = components.model.state_dict()
    return {
        "model": model,
        "model_versions": getattr(model, "_metadata", {}),  # of the modules' own formats, which torch keeps beside the tensors
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


def may_be_infinite(model: nn.Module) -> Callable[[str], bool]:
    """Return what tells of a tensor's name whether infinity is no sign of lost weights: a buffer may hold a mask."""
    buffers = {f"model.{name}" for name, _ in model.named_buffers(remove_duplicate=False)}
    return lambda name: name in buffers


def class_of(value: object) -> str:
    """Return the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
