"""Checkpoints: complete and verified, or not there; reading one executes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train import checkpoint
from ddp_train.build import Components
from ddp_train.distributed import alone
from ddp_train.errors import UserError
from ddp_train.state import TrainState, WindowSums
from ddp_train.trainer import Loop, train
from tests.conftest import FEW, TINY
from tests.unit.parts import components


def saved(folder: Path, step: int, parts: Components | None = None, keep_last: int = 2) -> Path:
    state = TrainState(step=step, samples=step * 32, best={"eval/loss": {"value": 1.5, "step": 1}})
    saver = checkpoint.Saver(folder, alone(), config_hash="abc", remove_old=lambda folder: checkpoint.remove_old(folder, keep_last=keep_last))
    saver.save(parts or components(), state, WindowSums())
    assert saver.finish() == ""
    return folder / f"step_{step:08d}"


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    parts = components("optimizer=muon", "amp=bf16")
    torch.rand(7)
    path = saved(tmp_path, 3, parts)
    expected, random_numbers = [parameter.clone() for parameter in parts.model.parameters()], torch.rand(5)
    other, state = components("optimizer=muon", "amp=bf16", "seed=9"), TrainState()
    assert checkpoint.load(path, other, state, alone())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.model.parameters(), expected, strict=True))
    assert (state.step, state.samples, state.best) == (3, 96, {"eval/loss": {"value": 1.5, "step": 1}})
    assert torch.equal(torch.rand(5), random_numbers)
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 1


class Noisy(torch.nn.Module):
    """A model that draws from every global generator in its forward."""

    def __init__(self, image_shape: list[int], num_classes: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(int(np.prod(image_shape)), num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        noise = random.gauss() + np.random.standard_normal() + torch.randn(()) if self.training else 0.0
        logits: torch.Tensor = self.head(images.flatten(1) + noise)
        return logits


def test_a_model_that_draws_from_python_numpy_and_torch_continues_bitwise(tmp_path: Path) -> None:
    noisy = ["model._target_=tests.unit.test_checkpoint.Noisy", "~model.width", "~model.depth", "scheduler=constant"]
    records: dict[str, list[dict[str, Any]]] = {"whole": [], "parts": []}

    def train_to(last: int, name: str, state: TrainState, *, load: Path | None = None) -> Components:
        parts = components(*noisy, f"trainer.max_steps={last}", "trainer.evaluate_every_steps=5", base=[*TINY[:1], *FEW])
        if load:
            assert checkpoint.load(load, parts, state, alone())
        settings = {"log_every_steps": 1, "evaluate_every_steps": 5, "checkpoint_every_steps": None, "clip_grad_norm": None}
        train(parts, state, alone(), Loop(**settings, write=records[name].append, save=lambda window: None))  # type: ignore[arg-type]
        return parts

    whole = train_to(10, "whole", TrainState())
    state = TrainState()
    stopped = train_to(5, "parts", state)
    saver = checkpoint.Saver(tmp_path, alone(), config_hash="abc")
    saver.save(stopped, state, WindowSums())
    assert saver.finish() == ""
    resumed = train_to(10, "parts", TrainState(), load=tmp_path / "step_00000005")
    assert [record["loss"] for record in records["parts"]] == [record["loss"] for record in records["whole"]]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_the_loss_scale_follows_the_number_of_ranks(tmp_path: Path) -> None:
    """The loop multiplies the loss by the number of ranks, so the scale times that number is what must go on."""
    parts = components()
    parts.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    path = saved(tmp_path, 3, parts)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"world_size": 2}))
    shutil.copy(path / "rank_00000.pt", path / "rank_00001.pt")
    assert not checkpoint.load(path, parts, TrainState(), alone())
    assert parts.scaler.get_scale() == 2.0**11


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        saved(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000010"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "is damaged": lambda path: flip(path / "shared.pt"),
    "bytes instead of": lambda path: os.truncate(path / "rank_00000.pt", 10),
    "shared.pt is missing": lambda path: (path / "shared.pt").unlink(),
    "COMPLETE or manifest.json is missing": lambda path: (path / "COMPLETE").unlink(),
    "manifest.json cannot be read": lambda path: (path / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, said: str) -> None:
    good, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    DAMAGES[said](bad)
    found, refused = checkpoint.newest_good(tmp_path)
    assert found == good
    assert len(refused) == 1
    assert said in refused[0]
    assert "step_00000002" in refused[0]


def test_a_half_written_one_does_not_exist_and_is_swept_away_by_the_next(tmp_path: Path) -> None:
    half = tmp_path / ".partial_step_00000005"
    half.mkdir(parents=True)
    (half / "shared.pt").write_bytes(b"half")
    assert checkpoint.newest_good(tmp_path) == (None, [])
    saved(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_a_full_disk_is_an_error_and_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = saved(tmp_path, 1)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step 2 was not saved; earlier ones are untouched.*No space left"):
        saved(tmp_path, 2)
    assert checkpoint.newest_good(tmp_path)[0] == good


class Malicious:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    path, marker = saved(tmp_path, 1), tmp_path / "marker"
    torch.save({"model": Malicious(str(marker))}, path / "shared.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        checkpoint.load(path, components(), TrainState(), alone())
    assert not marker.exists()


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    with pytest.raises(UserError, match="does not fit this model"):
        checkpoint.load(path, components("model.width=17"), TrainState(), alone())
    shutil.rmtree(path)


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        saved(tmp_path, step, keep_last=9)
    assert checkpoint.set_aside_after(tmp_path / "step_00000004") == ["aside_0_step_00000008", "aside_0_step_00000012"]
    saved(tmp_path, 6)
    assert checkpoint.newest_good(tmp_path)[0] == tmp_path / "step_00000006"
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000004", "step_00000006"]


def test_a_weight_decay_changed_on_resuming_counts(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, components("optimizer.weight_decay=0.1"))
    changed = components("optimizer.weight_decay=0.7")
    checkpoint.load(path, changed, TrainState(), alone())
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.7, 0.0]
