"""Going back to a checkpoint: whatever it takes to read it is no hang."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddp_train.distributed.world import alone
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training.checkpoints import Checkpoints, retention
from ddp_train.training.loss_monitor import Rewind
from ddp_train.training.records import Records
from ddp_train.training.state import TrainState
from tests.unit.parts import checked, components, saved


def test_who_reads_a_checkpoint_from_a_slow_disk_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch ends a rank that has not moved for `cluster.step_timeout_s`."""
    parts, run_folder = components("optimizer=adamw", "model.width=64"), RunFolder(tmp_path)
    saved(run_folder.checkpoints, 1, parts)
    size = (run_folder.checkpoints / "step_00000001/rank_00000.safetensors").stat().st_size
    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.verify"], "_CHUNK", size // 10)
    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.read"], "_ROUND", size // 10)
    moments = list[float]()
    tracker = PhaseTracker()
    tracker.listen(lambda phase, step: moments.append(time.monotonic()))
    for name in ("readv", "preadv"):
        real = getattr(os, name)

        def slow(*arguments: Any, real: Any = real) -> Any:
            time.sleep(0.02)
            return real(*arguments)

        monkeypatch.setattr(os, name, slow)
    state = TrainState(step=3, samples=96)
    tracker.enter(Phase.START, 3)
    config = checked()
    Checkpoints(
        config=config,
        run_folder=run_folder,
        components=parts,
        state=state,
        world=alone(),
        keep=retention(config.tree["checkpoint"], parts),
        records=Records(run_folder, alone(), list),
        tracker=tracker,
        agree=lambda is_due: is_due,
    ).rewind(Rewind({}, "lost"))
    moments.append(time.monotonic())
    assert (state.step, state.samples) == (1, 96)
    assert len(moments) > 20  # while it is verified, and while it is read
    longest = max(later - before for before, later in pairwise(moments))
    assert longest < (moments[-1] - moments[0]) / 3
