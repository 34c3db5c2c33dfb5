"""Checkpoints: complete and verified, or not there; reading one executes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.folder import newest_good, remove_debris, set_aside_after
from ddp_train.checkpoint.save import Saver
from ddp_train.checkpoint.schedule import Retention, remove_old
from ddp_train.checkpoint.verify import verify
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.training import saved_state
from ddp_train.training.components import Components
from ddp_train.training.saved_state import content
from ddp_train.training.state import TrainState, WindowSums
from tests.conftest import FEW, TINY
from tests.unit.checkpoint_ranks import Ranks, worlds
from tests.unit.parts import LOSS, components, trainer


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


def saved(folder: Path, step: int, parts: Components | None = None, keep_last: int = 2) -> Path:
    state = TrainState(step=step, samples=step * 32, best={"eval/loss": {"value": 1.5, "step": 1}})
    saver = Saver(folder, alone(), config_hash="abc", remove_old=lambda folder: remove_old(folder, Retention(last=keep_last, ranking=LOSS)))
    saver.save(content(parts or components(), state, WindowSums(), alone()))
    assert saver.finish() == ""
    return folder / f"step_{step:08d}"


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    parts = components("optimizer=muon", "amp=bf16")
    torch.rand(7)
    path = saved(tmp_path, 3, parts)
    expected, random_numbers = [parameter.clone() for parameter in parts.model.parameters()], torch.rand(5)
    other, state = components("optimizer=muon", "amp=bf16", "seed=9"), TrainState()
    assert saved_state.load(path, other, state, alone())
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
    noisy = ["model._target_=tests.unit.checkpoint.test_read.Noisy", "~model.width", "~model.depth", "scheduler=constant"]
    records: dict[str, list[dict[str, Any]]] = {"whole": [], "parts": []}

    def train_to(last: int, name: str, state: TrainState, *, load: Path | None = None) -> Components:
        parts = components(*noisy, f"trainer.max_steps={last}", "evaluation.every_steps=5", base=[*TINY[:1], *FEW])
        if load:
            assert saved_state.load(load, parts, state, alone())
        trainer(parts, state, evaluate_every_steps=5, write=records[name].append).train()
        return parts

    whole = train_to(10, "whole", TrainState())
    state = TrainState()
    stopped = train_to(5, "parts", state)
    saver = Saver(tmp_path, alone(), config_hash="abc")
    saver.save(content(stopped, state, WindowSums(), alone()))
    assert saver.finish() == ""
    resumed = train_to(10, "parts", TrainState(), load=tmp_path / "step_00000005")
    assert [record["loss"] for record in records["parts"]] == [record["loss"] for record in records["whole"]]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_the_loss_scale_follows_the_number_of_ranks(tmp_path: Path) -> None:
    """The loop multiplies the loss by the number of ranks, so the scale times that number is what must go on."""
    parts = components()
    parts.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert Ranks(tmp_path, parts, size=2).save(3) == ""
    assert not saved_state.load(tmp_path / "step_00000003", parts, TrainState(), alone())
    assert parts.scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("size", [1, 3, 4])
def test_any_number_of_ranks_writes_the_same_state(tmp_path: Path, size: int) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=2")
    trainer(parts).train()
    assert Ranks(tmp_path, parts, size=size).save(3) == ""
    path = tmp_path / "step_00000003"
    sizes = [file.stat().st_size for file in sorted(path.glob("rank_*"))]
    assert len(sizes) == size
    assert max(sizes) - min(sizes) < 16_000  # headers, and what is rank 0's
    other, state = components("optimizer=adamw", "trainer.max_steps=2", "seed=9"), TrainState()
    assert saved_state.load(path, other, state, alone()) == (size == 1)
    assert_same_state(other, parts)
    assert state.window == WindowSums([float(sum(range(size)))], [2.0], skipped=sum(range(size)))


def test_ranks_read_what_all_have_once_together_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=2")
    trainer(parts).train()
    assert Ranks(tmp_path, parts, size=4).save(3) == ""
    path, count, moved = tmp_path / "step_00000003", dict.fromkeys(range(3), 0), list[int]()
    real = tensor_file.read_bytes

    def counted(descriptor: int, position: int, values: torch.Tensor) -> None:
        count[int(threading.current_thread().name)] += values.numel()
        real(descriptor, position, values)

    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.read"], "_ROUND", 10_000)  # tensors are cut
    monkeypatch.setattr(tensor_file, "read_bytes", counted)
    others = [components("optimizer=adamw", "trainer.max_steps=2", "seed=9") for _ in range(3)]
    states = [TrainState() for _ in others]
    ranks = worlds(3)  # rank 0 serves the store of all of them, to the end
    threads = [
        threading.Thread(
            target=saved_state.load, args=(path, *each), kwargs={"moves": lambda: moved.append(1)}, name=str(rank), daemon=True
        )
        for rank, each in enumerate(zip(others, states, ranks, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for other, state in zip(others, states, strict=True):
        assert_same_state(other, parts)
        assert state.step == 3
    size = sum(file.stat().st_size for file in path.glob("rank_*"))
    assert sum(count.values()) < 1.2 * size  # not three times; the plain parts of the ranks' own come besides
    assert max(count.values()) < 0.75 * size
    assert len(moved) > size / 10_000


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
    saved_state.load(path, parts, TrainState(), alone())
    assert len(old) > 6
    assert alive == [0]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        saved(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000010"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def forge(path: Path, **changes: Any) -> None:
    """Write a manifest, and the mark that goes with it."""
    text = json.dumps(json.loads((path / "manifest.json").read_text()) | changes)
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


FILE = "rank_00000.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    f"{FILE} is damaged": lambda path: flip(path / FILE),
    f"{FILE} has 10 bytes instead of": lambda path: os.truncate(path / FILE, 10),
    f"{FILE} is missing": lambda path: (path / FILE).unlink(),
    f"{FILE} cannot be opened": lambda path: replace(path / FILE, lambda link: link.symlink_to("/etc/hostname")),
    f"{FILE} is not a plain file": lambda path: replace(path / FILE, os.mkfifo),
    "other.bin is not in manifest.json": lambda path: (path / "other.bin").touch(),
    "COMPLETE is missing": lambda path: (path / "COMPLETE").unlink(),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is damaged": lambda path: flip(path / "manifest.json"),
    "manifest.json cannot be read": lambda path: forge(path, files=3),
    "manifest.json is of format 2": lambda path: forge(path, format=2),
    "manifest.json is of step 7": lambda path: forge(path, step=7),
    "'../step_00000001/COMPLETE' is no name": lambda path: forge(
        path,
        files={"../step_00000001/COMPLETE": {"bytes": 1, "xxh3_128": ""}}
        | {FILE: {"bytes": (path / FILE).stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest((path / FILE).read_bytes())}},
    ),
    "step_00000002 is not a folder": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, said: str) -> None:
    good, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    DAMAGES[said](bad)
    found, refused = newest_good(tmp_path)
    assert found == good
    assert len(refused) == 1
    assert said in refused[0]
    assert "step_00000002" in refused[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    os.chown(path / FILE, 12345, -1)
    assert verify(path) == f"{FILE} belongs to the user with number 12345"


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_at_the_next_start(tmp_path: Path) -> None:
    for name in (".partial_step_00000005_ab_1", ".removed_step_00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(b"half")
    (tmp_path / ".partial_link").symlink_to(tmp_path.parent)
    assert newest_good(tmp_path) == (None, [])
    assert len(remove_debris(tmp_path)) == 3
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.parent.exists()


def test_a_checkpoint_that_lies_in_its_plain_part_is_refused(tmp_path: Path) -> None:
    """Hashes tell damage, not intent: what a forger has hashed himself is still only tensors and JSON."""
    path = saved(tmp_path, 1)
    content = (path / FILE).read_bytes()
    assert b'"$tensor"' in content
    content = content.replace(b'"$tensor"', b'"$import"')
    (path / FILE).write_bytes(content)
    forge(path, files={FILE: {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}})
    assert verify(path) == ""
    with pytest.raises(UserError, match=r"is missing|a checkpoint says"):
        saved_state.load(path, components(), TrainState(), alone())


def test_all_keys_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    other = components()
    first = next(name for name, _ in other.model.named_parameters())
    other.model.register_buffer("extra", torch.zeros(2))
    layers = dict(other.model.named_modules())
    layers[first.rpartition(".")[0]].to(torch.float64)
    before = [parameter.clone() for parameter in other.model.parameters()]
    with pytest.raises(UserError) as error:
        saved_state.load(path, other, TrainState(), alone())
    assert "extra is missing in the checkpoint" in str(error.value)
    assert f"{first} is float32" in str(error.value)
    assert "float64" in str(error.value)
    assert all(torch.equal(mine, was) for mine, was in zip(other.model.parameters(), before, strict=True))
    with pytest.raises(UserError, match=r"the optimizer was torch\.optim.*, and is torch\.optim\.sgd\.SGD"):
        saved_state.load(path, components("optimizer=sgd"), TrainState(), alone())


def test_an_optimizer_with_states_of_another_type_gets_them_back_uncast(tmp_path: Path) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=1")
    trainer(parts).train()
    for values in parts.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].double() * (1 + 1e-12)
    other = components("optimizer=adamw", "trainer.max_steps=1")
    saved_state.load(saved(tmp_path, 1, parts), other, TrainState(), alone())
    assert_same_state(other, parts)


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    with pytest.raises(UserError, match="does not fit this model"):
        saved_state.load(path, components("model.width=17"), TrainState(), alone())
    shutil.rmtree(path)


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        saved(tmp_path, step, keep_last=9)
    assert set_aside_after(tmp_path, tmp_path / "step_00000004") == ["aside_0_step_00000008", "aside_0_step_00000012"]
    saved(tmp_path, 6)
    assert newest_good(tmp_path)[0] == tmp_path / "step_00000006"
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000004", "step_00000006"]


def test_a_run_that_begins_again_sets_all_of_them_aside(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    assert set_aside_after(tmp_path, None) == ["aside_0_step_00000004"]


def test_a_weight_decay_changed_on_resuming_counts_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, 1, components("optimizer.weight_decay=0.1"))
    changed = components("optimizer.weight_decay=0.7")
    saved_state.load(path, changed, TrainState(), alone())
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.7, 0.0]
    assert "optimizer group 0: weight_decay is 0.7 as configured; the checkpoint had 0.1" in capsys.readouterr().out


def test_a_weight_decay_that_is_switched_on_or_off_keeps_every_parameters_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def moments(parts: Components) -> dict[str, Tensor]:
        return {name: parts.optimizer.state[parameter]["exp_avg"] for name, parameter in parts.model.named_parameters()}

    base = ["trainer.max_steps=3", "scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR"]
    base += ["~scheduler.step_size", "~scheduler.gamma", "+scheduler.T_max=1"]  # one of those that keep a rate for each group
    for before, after in (("0.1", "0.0"), ("0.0", "0.1")):
        trained = components(*base, f"optimizer.weight_decay={before}")
        trainer(trained).train()
        path = saved(tmp_path / after, 1, trained)
        changed = components(*base, f"optimizer.weight_decay={after}")
        saved_state.load(path, changed, TrainState(), alone())
        for name, value in moments(trained).items():
            assert torch.equal(value, moments(changed)[name]), name
        assert f"weight_decay is {float(after)} as configured; the checkpoint had {float(before)}" in capsys.readouterr().out
        trainer(changed).train()
    path = saved(tmp_path / "other", 1, trained)  # one group, in another order than that of an optimizer that does not know of decay
    with pytest.raises(UserError, match="had the parameters in another order"):
        saved_state.load(path, components(*base, "~optimizer.weight_decay"), TrainState(), alone())
