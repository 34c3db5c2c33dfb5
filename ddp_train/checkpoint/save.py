"""Writing: all ranks into a folder beside the final one, which rank 0 renames."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ddp_train.build import Components
from ddp_train.checkpoint.folder import publish
from ddp_train.checkpoint.retention import remove_old
from ddp_train.distributed import World
from ddp_train.state import TrainState, WindowSums, random_state


def save(
    folder: Path, components: Components, state: TrainState, window: WindowSums, world: World, *, keep_last: int, config_hash: str
) -> None:
    """Save the run's state below `folder`, then remove all but the newest `keep_last` checkpoints. Collective.

    Raises:
        OSError: on every rank when one could not write; the earlier checkpoints are untouched.
    """
    final = folder / f"step_{state.step:08d}"
    partial = folder / f".partial_{final.name}"
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)  # debris of a run that was killed while saving
        partial.mkdir(parents=True)
    world.barrier()
    problem = ""
    try:
        own = {"random": random_state(world.device), "window": asdict(window), "data": components.train_loader.state_dict(state.samples)}
        _write(partial / f"rank_{world.rank:05d}.pt", own)
        if world.is_main:
            _write(partial / "shared.pt", _shared_state(components, state))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        problem = f"rank {world.rank}: {error}"
    problems = [text for text in world.gather(problem) if text]
    if not problems and world.is_main:
        try:
            publish(partial, final, {"step": state.step, "world_size": world.size, "config_sha256": config_hash})
            remove_old(folder, keep_last=keep_last)
        except OSError as error:
            problems = [f"rank 0: {error}"]
    problems = world.from_main(problems)
    if problems:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # it would keep a full disk full
        raise OSError(f"the checkpoint of step {state.step} was not saved; earlier ones are untouched. " + "; ".join(problems))


def _shared_state(components: Components, state: TrainState) -> dict[str, Any]:
    return {
        "model": components.model.state_dict(),
        "optimizer": components.optimizer.state_dict(),
        "scheduler": components.scheduler.state_dict(),
        "scaler": components.scaler.state_dict(),
        "state": state.state_dict(),
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())
