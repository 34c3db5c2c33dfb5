"""The state of a run: all of it comes back, and what does not fit is refused in words."""

from __future__ import annotations

import json
import random
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from ddp_train.checkpoint.manifest import CheckpointError
from ddp_train.checkpoint.read import damage_of
from ddp_train.checkpoint.save import Saver
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.strategy.ddp import DDP
from ddp_train.training.parts.components import Components
from ddp_train.training.state import saved_state
from ddp_train.training.state.saved_state import RankState, SharedState, checkpoint_content
from ddp_train.training.train_state import Best, TrainState, WindowSums
from tests.conftest import FEW, TINY
from tests.unit.checkpoint.states import FILE, assert_same_state, forge, saved
from tests.unit.checkpoint_ranks import Ranks
from tests.unit.parts import components, trainer


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    parts = components("optimizer=muon", "amp=bf16")
    torch.rand(7)
    path = saved(tmp_path, 3, parts)
    expected, random_numbers = [parameter.clone() for parameter in parts.model.parameters()], torch.rand(5)
    other, state = components("optimizer=muon", "amp=bf16", "seed=9"), TrainState()
    assert saved_state.start_from(path, other, state, alone())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.model.parameters(), expected, strict=True))
    assert (state.step, state.position, state.best) == (3, 96, {"eval/loss": Best(1.5, 1)})
    assert torch.equal(torch.rand(5), random_numbers)
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 1


@pytest.mark.parametrize(
    ("reader", "lost", "kind"), [("read_shared", "scheduler", SharedState), ("read_own", "random", RankState), ("window", "", WindowSums)]
)
def test_a_part_that_is_missing_or_unknown_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, lost: str, kind: type[Any]
) -> None:
    path = saved(tmp_path, 3, components())
    read = getattr(saved_state, "read_own" if reader == "window" else reader)

    def changed(*args: Any, **options: Any) -> dict[str, Any]:
        parts: dict[str, Any] = read(*args, **options)
        if reader == "window":
            return {**parts, "window": {**parts["window"], "invented": 1}}
        return {name: part for name, part in parts.items() if name != lost} | {"invented": 1}

    monkeypatch.setattr(saved_state, "read_own" if reader == "window" else reader, changed)
    with pytest.raises(CheckpointError) as refusal:
        saved_state.start_from(path, components(), TrainState(), alone())
    problems = ", ".join([*([f"{lost} is missing"] if lost else []), "invented is unknown"])
    assert f"the parts of {kind.__name__} are not those of this format: {problems}" in str(refusal.value)


@pytest.mark.parametrize("state_is_per_rank", [False, True])
def test_the_state_of_a_strategy_is_saved_once_or_as_each_ranks_own(tmp_path: Path, state_is_per_rank: bool) -> None:
    class Counting(DDP):
        def __init__(self) -> None:
            self.state_is_per_rank = state_is_per_rank
            self.kept: Mapping[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.kept)

        def start_training(self, trained_module: nn.Module, state: Mapping[str, Any], *, weights_are_equal: bool) -> None:
            self.kept = state
            assert weights_are_equal

    parts, other = components(), components()
    parts, other = replace(parts, strategy=Counting()), replace(other, strategy=Counting())
    parts.strategy.start_training(parts.trained_module, {"last": torch.ones(2)}, weights_are_equal=True)
    held = checkpoint_content(parts, TrainState(), WindowSums(), alone())
    assert ("strategy" in held.own, "strategy" in held.shared) == (state_is_per_rank, not state_is_per_rank)
    saved_state.start_from(saved(tmp_path, 3, parts), other, TrainState(), alone())
    assert torch.equal(other.strategy.state_dict()["last"], torch.ones(2))


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
    noisy = ["model._target_=tests.unit.training.state.test_saved_state.Noisy", "~model.width", "~model.depth", "scheduler=constant"]
    records: dict[str, list[dict[str, Any]]] = {"whole": [], "parts": []}

    def train_to(last: int, name: str, state: TrainState, *, load: Path | None = None) -> Components:
        parts = components(*noisy, f"trainer.max_steps={last}", "evaluation.every_steps=5", base=[*TINY[:1], *FEW])
        if load:
            assert saved_state.start_from(load, parts, state, alone())
        trainer(parts, state, evaluate_every_steps=5, write=records[name].append).train()
        return parts

    whole = train_to(10, "whole", TrainState())
    state = TrainState()
    stopped = train_to(5, "parts", state)
    saver = Saver(folder=tmp_path, world=alone(), config_hash="abc")
    saver.save(checkpoint_content(stopped, state, WindowSums(), alone()))
    assert saver.finish() is None
    resumed = train_to(10, "parts", TrainState(), load=tmp_path / "step_00000005")
    assert [record["loss"] for record in records["parts"]] == [record["loss"] for record in records["whole"]]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_the_loss_scale_follows_the_number_of_ranks(tmp_path: Path) -> None:
    """The loop multiplies the loss by the number of ranks, so the scale times that number is what must go on."""
    parts = components()
    parts = replace(parts, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    assert Ranks(tmp_path, parts, size=2).save(3) is None
    assert not saved_state.start_from(tmp_path / "step_00000003", parts, TrainState(), alone())
    assert parts.scaler.get_scale() == 2.0**11


def test_a_checkpoint_that_lies_in_its_plain_part_is_refused(tmp_path: Path) -> None:
    """Hashes tell damage, not intent: what a forger has hashed himself is still only tensors and JSON."""
    path = saved(tmp_path, 1)
    content = (path / FILE).read_bytes()
    assert b'"$tensor"' in content
    content = content.replace(b'"$tensor"', b'"$import"')
    (path / FILE).write_bytes(content)
    forge(path, files={FILE: {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}})
    assert damage_of(path) is None
    with pytest.raises(UserError, match=r"is missing|a checkpoint says"):
        saved_state.start_from(path, components(), TrainState(), alone())


def test_all_keys_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    other = components()
    first = next(name for name, _ in other.model.named_parameters())
    other.model.register_buffer("extra", torch.zeros(2))
    layers = dict(other.model.named_modules())
    layers[first.rpartition(".")[0]].to(torch.float64)
    before = [parameter.clone() for parameter in other.model.parameters()]
    with pytest.raises(UserError) as error:
        saved_state.start_from(path, other, TrainState(), alone())
    assert "extra is missing in the checkpoint" in str(error.value)
    assert f"{first} is float32" in str(error.value)
    assert "float64" in str(error.value)
    assert all(torch.equal(mine, was) for mine, was in zip(other.model.parameters(), before, strict=True))
    with pytest.raises(UserError, match=r"the optimizer was torch\.optim.*, and is torch\.optim\.sgd\.SGD"):
        saved_state.start_from(path, components("optimizer=sgd"), TrainState(), alone())


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    with pytest.raises(UserError, match="does not fit this model"):
        saved_state.start_from(path, components("model.width=17"), TrainState(), alone())
    shutil.rmtree(path)


def test_a_rate_that_jumps_because_the_run_is_longer_now_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        parts, state = components("trainer.max_steps=2", "scheduler.warmup_steps=0", *words), TrainState()
        trainer(parts, state).train()
        path = saved(tmp_path / "-".join(["run", *words]), 2, parts)
        capsys.readouterr()
        saved_state.start_from(path, components("trainer.max_steps=2", "scheduler.warmup_steps=0", *words), TrainState(), alone())
        assert "rate " not in capsys.readouterr().out  # with the same settings
        saved_state.start_from(path, components("trainer.max_steps=8", "scheduler.warmup_steps=0", *words), TrainState(), alone())
        return capsys.readouterr().out

    assert "the learning rate goes from 0.0001 to 0.0008" in said()
    assert "rate " not in said("scheduler=constant")


def test_a_run_that_goes_back_keeps_one_state_of_its_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=1")
    trainer(parts).train()
    path = saved(tmp_path, 1, parts)
    old = [weakref.ref(value) for values in parts.optimizer.state.values() for value in values.values()]
    alive = list[int]()
    real = parts.optimizer.load_state_dict

    def noted(state: dict[str, Any]) -> None:
        alive.append(sum(each() is not None for each in old))
        real(state)

    monkeypatch.setattr(parts.optimizer, "load_state_dict", noted)
    saved_state.start_from(path, parts, TrainState(), alone())
    assert len(old) > 6
    assert alive == [0]


def test_an_optimizer_with_states_of_another_type_gets_them_back_uncast(tmp_path: Path) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=1")
    trainer(parts).train()
    for values in parts.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].double() * (1 + 1e-12)
    other = components("optimizer=adamw", "trainer.max_steps=1")
    saved_state.start_from(saved(tmp_path, 1, parts), other, TrainState(), alone())
    assert_same_state(other, parts)


def test_a_weight_decay_changed_on_resuming_counts_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, 1, components("optimizer.weight_decay=0.1"))
    changed = components("optimizer.weight_decay=0.7")
    saved_state.start_from(path, changed, TrainState(), alone())
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.7, 0.0]
    assert "optimizer group 0: weight_decay is 0.7 as configured; the checkpoint had 0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.weight_decay=0.1", r"groups had \[\d+\] parameters, and have \[\d+, \d+\]"),
        ("~optimizer.weight_decay", "had the parameters in another order"),  # it does not know of decay, and sorts nothing by it
    ],
)
def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path, override: str, says: str) -> None:
    path = saved(tmp_path, 1, components("optimizer.weight_decay=0.0"))
    with pytest.raises(UserError, match=says):
        saved_state.start_from(path, components(override), TrainState(), alone())
