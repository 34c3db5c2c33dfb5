"""Checkpoints that tests save, spoil and compare."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from ddp_train.checkpoint.save import Saver
from ddp_train.checkpoint.schedule import Retention, remove_old
from ddp_train.distributed.world import alone
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import Best, TrainState, WindowSums
from tests.unit.parts import LOSS, components

FILE = "rank_00000.safetensors"


def assert_same_state(one: Components, other: Components) -> None:
    """Compare models and optimizers bit for bit."""
    for mine, theirs in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, values in mine["state"].items():
        for name, value in values.items():
            assert value.dtype == theirs["state"][number][name].dtype
            assert torch.equal(value, theirs["state"][number][name])


def saved(folder: Path, step: int, parts: Components | None = None, keep_last: int = 2, run: str | None = None) -> Path:
    """Save a checkpoint as a run does that keeps the newest ones, and return it."""
    state = TrainState(step=step, position=step * 32, best={"eval/loss": Best(1.5, 1)})
    keep = Retention(last=keep_last, ranking=LOSS)
    saver = Saver(folder=folder, world=alone(), config_hash="abc", run=run, remove_old=lambda folder: remove_old(folder, keep))
    saver.save(checkpoint_content(parts or components(), state, WindowSums(), alone()))
    assert saver.finish() is None
    return folder / f"step_{step:08d}"


def forge(path: Path, **changes: Any) -> None:
    """Write a manifest, and the mark that goes with it."""
    text = json.dumps(json.loads((path / "manifest.json").read_text()) | changes)
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())
