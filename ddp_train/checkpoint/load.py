"""Reading: every rank puts a verified checkpoint into its components. Nothing in it is executed: tensors and JSON, by our own readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_train.build import Components
from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.compare import compare_model, compare_optimizer, load_optimizer, with_versions
from ddp_train.checkpoint.parts import parts
from ddp_train.checkpoint.share import Piece, whole
from ddp_train.checkpoint.snapshot import OWN, SHARED, divide_shared
from ddp_train.checkpoint.verify import CheckpointError, opened, rank_file, read_manifest
from ddp_train.distributed import World
from ddp_train.errors import UserError
from ddp_train.state import TrainState, WindowSums, set_random_state


def load(checkpoint: Path, components: Components, state: TrainState, world: World) -> bool:
    """Put a verified checkpoint into the components. Every rank reads the files.

    Returns:
        Whether the random streams came back too; with another world size they cannot.

    Raises:
        CheckpointError: it is not what its format says.
        UserError: it is of another model or optimizer.
    """
    saved_size: int = read_manifest(checkpoint)["world_size"]
    shared = read_shared(checkpoint)
    _restore(checkpoint, shared, components, state, world)
    if saved_size == world.size:
        own = read_own(checkpoint, world.rank)
        state.window = WindowSums(**own["window"])
        components.train_loader.load_state_dict(own["data"])
        set_random_state(own["random"], world.device)
        return True
    if components.scaler.is_enabled():  # the scale times the number of ranks stays (amp.py)
        components.scaler.load_state_dict({**shared["scaler"], "scale": shared["scaler"]["scale"] * saved_size / world.size})
    windows = [WindowSums(**read_own(checkpoint, rank)["window"]) for rank in range(saved_size if world.is_main else 1)]
    state.window = WindowSums.shared_out(windows, is_main=world.is_main)
    return False


def read_shared(checkpoint: Path) -> dict[str, Any]:
    """Return what all ranks have: model, model_versions, optimizer, scheduler, ... Tensors are on the CPU.

    Raises:
        CheckpointError: it is not what its format says.
    """
    size: int = read_manifest(checkpoint)["world_size"]
    with ExitStack() as stack:
        files = [_File(checkpoint, rank, stack) for rank in range(size)]
        plain = files[0].plain(SHARED)
        shares = divide_shared(_leaves(plain), size)
        return _decode(plain, [(files[rank], piece) for rank, share in enumerate(shares) for piece in share])


def read_own(checkpoint: Path, rank: int) -> dict[str, Any]:
    """Return what was one rank's alone: random, window, data.

    Raises:
        CheckpointError: it is not what its format says.
    """
    with ExitStack() as stack:
        file = _File(checkpoint, rank, stack)
        plain = file.plain(OWN)
        return _decode(plain, [(file, piece) for piece in whole(_leaves(plain))])


def _restore(checkpoint: Path, shared: Mapping[str, Any], components: Components, state: TrainState, world: World) -> None:
    """Put what all ranks have into the components, after comparing all of it."""
    model, optimizer = components.model, components.optimizer
    problems = compare_model(model, shared["model"]) + compare_optimizer(optimizer, shared)
    if not problems:
        try:
            model.load_state_dict(with_versions(shared["model"], shared["model_versions"]))
            differences = load_optimizer(optimizer, shared["optimizer"])
            for name, part in parts(components, state).items():
                part.load_state_dict(shared[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise UserError(
            key="resume",
            happened="\n    ".join([f"{checkpoint} does not fit this model and optimizer:", *problems]),
            expected="a checkpoint of the same configuration",
            fix="resume=never, or the configuration that it was saved with",
        )
    if world.is_main:
        for difference in differences:
            print(difference, flush=True)


class _File:
    """One rank's file, open."""

    def __init__(self, checkpoint: Path, rank: int, stack: ExitStack) -> None:
        self._name = rank_file(rank)
        self._descriptor = stack.enter_context(opened(checkpoint, self._name))
        self._entries = tensor_file.read_header(self._descriptor, self._name)

    def plain(self, name: str) -> Any:
        """Return a plain part."""
        text = torch.empty(self._entry(name).shape, dtype=torch.uint8)
        tensor_file.read_into(self._descriptor, self._entry(name), text)
        try:
            return json.loads(text.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(happened=f"{self._name}: its part {name!r} cannot be read ({error})") from None

    def require(self, piece: Piece) -> None:
        """Check that a piece is there, in the size that it must have, before memory is taken for it."""
        entry = self._entry(piece.name)
        if entry.end - entry.begin != piece.num_bytes:
            raise CheckpointError(
                happened=f"{self._name}: {piece.name} has {entry.end - entry.begin:,} bytes instead of {piece.num_bytes:,}"
            )

    def read(self, piece: Piece, tensor: Tensor) -> None:
        """Read a piece into its tensor."""
        tensor_file.read_into(self._descriptor, self._entry(piece.name), tensor.view(-1)[piece.start : piece.stop])

    def _entry(self, name: str) -> tensor_file.Entry:
        if name not in self._entries:
            raise CheckpointError(happened=f"{self._name}: {name} is missing")
        return self._entries[name]


def _leaves(plain: Any) -> list[codec.Leaf]:
    return list(codec.leaves(plain).values())


def _decode(plain: Any, pieces: list[tuple[_File, Piece]]) -> dict[str, Any]:
    for file, piece in pieces:
        file.require(piece)
    leaves = {piece.leaf.name: piece.leaf for _, piece in pieces}
    tensors = {name: torch.empty(leaf.shape, dtype=leaf.dtype) for name, leaf in leaves.items()}
    for file, piece in pieces:
        file.read(piece, tensors[piece.leaf.name])
    state = codec.decode(plain, tensors)
    if not isinstance(state, dict):
        raise CheckpointError(happened=f"a {type(state).__name__} was saved instead of a state")
    return state
