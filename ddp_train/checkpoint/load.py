"""Reading: every rank puts a verified checkpoint into its components."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ddp_train.build import Components
from ddp_train.checkpoint.folder import MANIFEST
from ddp_train.distributed import World
from ddp_train.errors import UserError
from ddp_train.state import TrainState, WindowSums, set_random_state

_CONFIGURED = ("weight_decay", "eps")  # hyper-parameters that no schedule changes; the learning rate is the scheduler's


def load(checkpoint: Path, components: Components, state: TrainState, world: World) -> bool:
    """Put a verified checkpoint into the components. Every rank reads the files.

    Returns:
        Whether the random streams came back too; with another world size they cannot.

    Raises:
        UserError: the checkpoint is of another model.
    """
    shared = torch.load(checkpoint / "shared.pt", map_location="cpu", weights_only=True)
    try:
        components.model.load_state_dict(shared["model"])
        configured = [{key: value for key, value in group.items() if key in _CONFIGURED} for group in components.optimizer.param_groups]
        components.optimizer.load_state_dict(shared["optimizer"])
        for group, values in zip(components.optimizer.param_groups, configured, strict=True):
            group.update(values)  # where `resume RUN optimizer.weight_decay=...` differs from what was saved, the config wins
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            key="resume",
            happened=f"{checkpoint} does not fit this model and optimizer:\n    {error}",
            expected="a checkpoint of the same configuration",
            fix="resume=never, or the configuration that it was saved with",
        ) from None
    components.scheduler.load_state_dict(shared["scheduler"])
    components.scaler.load_state_dict(shared["scaler"])
    state.load_state_dict(shared["state"])
    saved_world_size = json.loads((checkpoint / MANIFEST).read_text())["world_size"]
    if saved_world_size == world.size:
        own = _read_rank(checkpoint, world.rank)
        state.window = WindowSums(**own["window"])
        components.train_loader.load_state_dict(own.get("data", {}))
        set_random_state(own["random"], world.device)
        return True
    if components.scaler.is_enabled():  # the scale times the number of ranks stays (amp.py)
        scale = shared["scaler"]["scale"] * saved_world_size / world.size
        components.scaler.load_state_dict({**shared["scaler"], "scale": scale})
    windows = [WindowSums(**_read_rank(checkpoint, rank)["window"]) for rank in range(saved_world_size if world.is_main else 1)]
    if world.is_main:  # it carries on what all of them had
        loss_sum, skipped = sum(window.loss_sum for window in windows), sum(window.skipped for window in windows)
        state.window = WindowSums(loss_sum, windows[0].weight, skipped)
    else:
        state.window = WindowSums(weight=windows[0].weight)
    return False


def _read_rank(checkpoint: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(checkpoint / f"rank_{rank:05d}.pt", map_location="cpu", weights_only=True)
    return found
