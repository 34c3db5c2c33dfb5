"""Checkpoints: a folder per step, complete and verified or not there at all.

    step_00001000/  shared.pt (model, optimizer, scheduler, scaler, position)  rank_00000.pt ... (random streams, state of the data)
                   manifest.json  COMPLETE

Everything is written into a folder beside it, synchronised to disk, and renamed. Nothing but tensors and plain containers is saved,
so that reading executes nothing (`weights_only=True`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ddp_train.build import Components
from ddp_train.distributed import World
from ddp_train.errors import UserError
from ddp_train.state import TrainState, WindowSums, random_state, set_random_state

_MANIFEST = "manifest.json"
_COMPLETE = "COMPLETE"
_CONFIGURED = ("weight_decay", "eps")  # hyper-parameters that no schedule changes; the learning rate is the scheduler's


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
            _publish(partial, final, {"step": state.step, "world_size": world.size, "config_sha256": config_hash})
            _prune(folder, keep_last)
        except OSError as error:
            problems = [f"rank 0: {error}"]
    problems = world.from_main(problems)
    if problems:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # it would keep a full disk full
        raise OSError(f"the checkpoint of step {state.step} was not saved; earlier ones are untouched. " + "; ".join(problems))


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files are what its manifest says, and why newer ones were passed over."""
    refused: list[str] = []
    for candidate in sorted(folder.glob("step_*"), reverse=True):
        problem = verify(candidate)
        if not problem:
            return candidate, refused
        refused.append(f"checkpoint {candidate.name} is not used: {problem}")
    return None, refused


def verify(checkpoint: Path) -> str:
    """Compare every file with the manifest; return what is wrong, or ""."""
    if not (checkpoint / _COMPLETE).exists() or not (checkpoint / _MANIFEST).exists():
        return f"{_COMPLETE} or {_MANIFEST} is missing"
    try:
        files = json.loads((checkpoint / _MANIFEST).read_text())["files"]
        for name, expected in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _sha256(path) != expected["sha256"]:
                return f"{name} is damaged (its sha256 differs)"
    except (ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return ""


def set_aside_after(checkpoint: Path) -> list[str]:
    """Rename the checkpoints of later steps, which a run that continues from `checkpoint` leaves behind; return their new names."""
    renamed = []
    for later in sorted(path for path in checkpoint.parent.glob("step_*") if path.name > checkpoint.name):
        free = (later.with_name(f"aside_{number}_{later.name}") for number in count())
        renamed.append(later.rename(next(path for path in free if not path.exists())).name)
    return renamed


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
    saved_world_size = json.loads((checkpoint / _MANIFEST).read_text())["world_size"]
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
    state.window = WindowSums.shared_out(windows, is_main=world.is_main)
    return False


def _read_rank(checkpoint: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(checkpoint / f"rank_{rank:05d}.pt", map_location="cpu", weights_only=True)
    return found


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


def _publish(partial: Path, final: Path, facts: Mapping[str, Any]) -> None:
    """Add manifest and mark, make everything durable, and rename: from then on the checkpoint exists."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(partial.iterdir())}
    manifest = {**facts, "torch": torch.__version__, "files": files}
    for name, text in ((_MANIFEST, json.dumps(manifest, indent=2) + "\n"), (_COMPLETE, "")):
        with (partial / name).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _prune(folder: Path, keep_last: int) -> None:
    for old in sorted(folder.glob("step_*"))[:-keep_last]:
        gone = old.rename(old.with_name(f".removed_{old.name}"))  # never half a checkpoint under a good name
        shutil.rmtree(gone)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
