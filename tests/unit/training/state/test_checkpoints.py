"""Going back to a checkpoint: whatever it takes to read it is no hang."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_train.checkpoint.staging import StagingBuffer
from ddp_train.distributed.world import alone
from ddp_train.errors import EnvironmentRefuses
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.phase import Phase, Phases
from ddp_train.training.check.memory import estimate_share
from ddp_train.training.parts.components import Components
from ddp_train.training.record.loss_monitor import Rewind
from ddp_train.training.record.records import Records
from ddp_train.training.state.checkpoints import Checkpoints, RewindError, probe_room, retention
from ddp_train.training.train_state import TrainState
from tests.unit.parts import checked, components, saved

MB = 10**6


def checkpoints(run_folder: RunFolder, parts: Components, state: TrainState, **changes: Any) -> Checkpoints:
    """Return those of a run on one rank, which records its events and no numbers."""
    config = checked()
    settings: dict[str, Any] = {"keep": retention(config.checkpoint, parts), "records": Records(run_folder, alone(), list)}
    settings |= {"phases": Phases(), "ask_to_save": lambda: True, "world": alone()} | changes
    return Checkpoints(config=config, run_folder=run_folder, components=parts, state=state, **settings)


def test_a_rewind_brings_the_weights_back_while_the_data_goes_on(tmp_path: Path) -> None:
    parts, run_folder, begun = components(), RunFolder(tmp_path), list[int]()
    for step in (1, 2):
        saved(run_folder.checkpoints, step, parts)
    saved_weights = [parameter.detach().clone() for parameter in parts.model.parameters()]
    state = TrainState(step=5, position=160)
    ours = checkpoints(run_folder, parts, state, records=Records(run_folder, alone(), lambda: begun.append(state.step) or []))
    for parameter in parts.model.parameters():
        parameter.data.fill_(float("nan"))
    ours.rewind(Rewind({"kind": "nonfinite"}, "lost"))
    assert all(torch.equal(now, then) for now, then in zip(parts.model.parameters(), saved_weights, strict=True))
    assert (state.step, state.position, state.steps_run) == (2, 160, 5)
    assert begun == [5, 2]  # the writers go on after the step of the checkpoint
    events = [json.loads(line) for line in run_folder.events.read_text().splitlines()]
    assert [event["kind"] for event in events] == ["nonfinite", "rewound"]
    assert (events[1]["from_step"], events[1]["step"], events[1]["jumped"]) == (5, 2, [64, 160])
    ours._records.close()


def test_on_a_gpu_memory_for_the_first_save_is_asked_for_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, parts = list[int](), components("model.width=64")
    monkeypatch.setattr(StagingBuffer, "__init__", lambda buffer, device: None)
    monkeypatch.setattr(StagingBuffer, "make_room", lambda buffer, num_bytes: asked.append(num_bytes))
    checkpoints(RunFolder(tmp_path), parts, TrainState())
    assert asked == []
    on_a_gpu = replace(alone(), device=torch.device("cuda", 0))
    checkpoints(RunFolder(tmp_path), parts, TrainState(), world=on_a_gpu)
    assert asked == [estimate_share(parts, on_a_gpu)]


def test_going_back_to_the_same_checkpoint_is_given_up_after_three_times(tmp_path: Path) -> None:
    parts, run_folder, state = components(), RunFolder(tmp_path), TrainState(step=5, position=160)
    ours = checkpoints(run_folder, parts, state)
    with pytest.raises(RewindError, match="There is no checkpoint to go back to yet"):
        ours.rewind(Rewind({}, "lost"))
    saved(run_folder.checkpoints, 2, parts)
    for _ in range(3):
        ours.rewind(Rewind({}, "lost"))
        state.step, state.position = state.step + 1, state.position + 32
    with pytest.raises(RewindError, match="Going back to step 2 and continuing with other data has failed 3 times"):
        ours.rewind(Rewind({}, "lost"))
    ours._records.close()


def test_who_reads_a_checkpoint_from_a_slow_disk_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch ends a rank that has not moved for `cluster.step_timeout_s`."""
    parts, run_folder = components("optimizer=adamw", "model.width=64"), RunFolder(tmp_path)
    saved(run_folder.checkpoints, 1, parts)
    size = (run_folder.checkpoints / "step_00000001/rank_00000.safetensors").stat().st_size
    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.manifest"], "CHUNK_BYTES", size // 10)
    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.read"], "_ROUND", size // 10)
    moments = list[float]()
    state, phases = TrainState(step=3, position=96), Phases()
    ours = checkpoints(run_folder, parts, state, phases=phases)
    phases.listen(lambda phase, step: moments.append(time.monotonic()))
    for name in ("readv", "preadv"):
        real = getattr(os, name)

        def slow(*arguments: Any, real: Any = real) -> Any:
            time.sleep(0.02)
            return real(*arguments)

        monkeypatch.setattr(os, name, slow)
    phases.enter(Phase.START, 3)
    ours.rewind(Rewind({}, "lost"))
    moments.append(time.monotonic())
    ours._records.close()
    assert (state.step, state.position) == (1, 96)
    assert len(moments) > 20  # while it is verified, and while it is read
    longest = max(later - before for before, later in pairwise(moments))
    assert longest < (moments[-1] - moments[0]) / 3


def test_room_for_two_and_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(*, free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    folder = tmp_path / "checkpoints"
    disk(free=2 * MB)
    probe_room(folder, MB)
    assert list(folder.iterdir()) == []
    disk(free=2 * MB - 1)
    with pytest.raises(EnvironmentRefuses, match=r"(?s)2.0 MB free, and needs 2.0 MB: one takes 1.0 MB .*hydra.run.dir=FOLDER"):
        probe_room(folder, MB)
    (folder / "step_00000001").mkdir()  # of the attempt before
    probe_room(folder, MB)
    disk(free=MB - 1)
    with pytest.raises(EnvironmentRefuses):
        probe_room(folder, MB)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentRefuses, match="cannot be written: Not a directory"):
        probe_room(tmp_path / "file" / "checkpoints", MB)

    def fail(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as context:
            context.setattr(os, call, fail)
            with pytest.raises(EnvironmentRefuses, match="cannot be written: Read-only file system"):
                probe_room(tmp_path, MB)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
